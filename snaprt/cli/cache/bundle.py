"""``snaprt cache export`` and ``import``: entries in one file, from one cache to another."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import click
from snaprt_cache import Cache, CacheError, EntryRow
from snaprt_cache.bundle import bundled_blobs, read_bundle, write_bundle
from snaprt_cache.frame import read_key_file

from snaprt import settings
from snaprt.cli import output, progress
from snaprt.cli.cache.words import cache_command
from snaprt.units import counted, format_size


@cache_command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="TEXT",
    help="Only programs whose name contains TEXT; * and ? match any characters. Repeatable.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Only entries whose key starts with KEY. Repeatable.",
)
def export(
    file: Path,
    cache: Cache,
    names: tuple[str, ...],
    keys: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write entries to FILE, to be imported into another cache.

    The same entries always produce the same bytes. If SNAPRT_CACHE_KEY_FILE is set, the file is
    signed.

    \b
    Example:
      snaprt cache export step.snapbundle --name train_step
    """
    rows = [row for row in cache.entries() if _is_wanted(row, names, keys)]
    if not rows:
        raise CacheError(
            f"no entry in {cache.path} matches",
            hint="`snaprt cache ls` lists the entries.",
        )
    with progress.showing(f"writing {counted(len(rows), 'entry', 'entries')}"):
        bundle = write_bundle(file, [row.key for row in rows], cache.open_blob, _signing_key())
    size = sum(blob.bytes for blob in bundle.blobs)
    if as_json:
        content = {
            "file": file,
            "entries": [blob.key for blob in bundle.blobs],
            "bytes": size,
            "signed": bundle.signed,
        }
        output.emit_json("snaprt.cache.export", content)
    else:
        output.log.print(
            f"Wrote {counted(len(rows), 'entry', 'entries')} ({format_size(size)}, "
            f"{'signed' if bundle.signed else 'not signed'}) to {file}."
        )


@cache_command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def import_(file: Path, cache: Cache, as_json: bool) -> None:
    """Import the entries of FILE, written by `snaprt cache export`, into the cache.

    FILE is verified first; if any part of it is damaged, nothing is imported. If
    SNAPRT_CACHE_KEY_FILE is set, FILE must be signed with that key. Entries contain executable
    code: without a key, import only files from people you trust. Existing entries are kept.

    \b
    Example:
      snaprt cache import step.snapbundle
    """
    key = _signing_key()
    added = 0
    with progress.showing("reading entries") as line:
        bundle = read_bundle(file, key)
        stored = {blob.key for blob in bundle.blobs if cache.header(blob.key) is not None}
        for digest, content in bundled_blobs(bundle):
            if digest in stored:
                continue
            if not cache.adopt(digest, content):
                raise CacheError(
                    f"only {added} of {len(bundle.blobs) - len(stored)} new entries could be "
                    f"stored in {cache.path}",
                    hint="See the warning above. You can repeat the import.",
                )
            added += 1
            line.done(added, len(bundle.blobs) - len(stored))
    cache.close()
    if as_json:
        content_ = {
            "file": file,
            "path": cache.path,
            "entries": [blob.key for blob in bundle.blobs],
            "imported": added,
            "already_there": len(stored),
            "signed": bundle.signed,
            "signature_checked": key is not None,
        }
        output.emit_json("snaprt.cache.import", content_)
        return
    checked = "signature checked" if key is not None else "signature not checked: no key is set"
    output.log.print(
        f"Imported {counted(added, 'entry', 'entries')} into {cache.path}; {len(stored):,} "
        f"already existed ({checked})."
    )


def _is_wanted(row: EntryRow, names: tuple[str, ...], keys: tuple[str, ...]) -> bool:
    named = not names or any(fnmatch.fnmatchcase(row.name, f"*{name}*") for name in names)
    return named and (not keys or row.key.startswith(tuple(key.lower() for key in keys)))


def _signing_key() -> bytes | None:
    path = settings.get("SNAPRT_CACHE_KEY_FILE")
    return None if path is None else read_key_file(path)

"""Writes the reference of the commands from the commands themselves, as `snaprt --help` shows them.

A hook of MkDocs, named in mkdocs.yml.
"""

import html
import re
import textwrap
from collections.abc import Iterator

import click
from mkdocs.structure.pages import Page

from snaprt.cli.main import group

PAGE = "reference/cli.md"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Append each command to the page that is for them."""
    if page.file.src_uri != PAGE:
        return markdown
    context = click.Context(group, info_name="snaprt")
    return "\n".join([markdown, *_commands(group, context, level=2)])


def _commands(parent: click.Group, context: click.Context, level: int) -> Iterator[str]:
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        assert command is not None
        inside = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inside))
        yield f"{'#' * level} {inside.command_path}\n"
        yield f"```text\n{inside.command_path} {usage}\n```\n"
        yield from _help(command.help or "")
        yield from _options(command, inside)
        if isinstance(command, click.Group):
            yield from _commands(command, inside, level + 1)


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs; those that click does not wrap are code."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        _, is_fixed, lines = paragraph.rpartition("\b\n")
        if not is_fixed:
            yield f"{_plain(' '.join(paragraph.split()))}\n"
            continue
        first, _, rest = lines.partition("\n")
        if first.endswith(":"):
            yield f"{_plain(first.strip())}\n"
        else:
            rest = lines
        yield f"```text\n{textwrap.dedent(rest)}\n```\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    records = [option.get_help_record(context) for option in options]
    yield "| option | effect |\n| --- | --- |"
    for names, meaning in (record for record in records if record is not None):
        code = html.escape(names).replace("|", "&#124;")
        yield f"| <code>{code}</code> | {_plain(meaning)} |"
    yield ""


def _plain(text: str) -> str:
    """Escape what Markdown would take for more than text, and make links of the documents."""
    escaped = re.sub(
        r"(`[^`]+`)|([\\`*_<>|\[\]{}#])", lambda found: found[1] or f"\\{found[2]}", text
    )
    return re.sub(r"docs/(\S+\.md)", r"[\g<0>](../\1)", escaped)

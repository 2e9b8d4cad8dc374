"""Decides what a bundle does not show: secrets, names of people and machines.

What is hidden is found by its shape, or because the environment says it; a secret of another shape
that a program prints cannot be told from its other output.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt.variables import HIDDEN, steers

_HARMLESS: Final = (*("JAX_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "PYTHON", "LC_"),)
"""Beginnings of the names of variables whose values are shown."""

_HARMLESS_NAMES: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LANG", "TERM", "TZ", "COLUMNS"),
    *("LINES", "NO_COLOR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"),
)

_SECRET_NAME: Final = re.compile(
    r"SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|(?:TOKEN|AUTH|(?:^|[_-])KEYS?)(?:$|[_-])",
    re.IGNORECASE,
)
"""Names, of variables and of options, that stand before a secret."""

_PLACE_NAME: Final = re.compile(r"HOST|ADDR|URL|REMOTE|ENDPOINT|PROXY")
"""Names of variables that say where a machine is, which their beginnings do not make harmless."""

_SHAPES: Final = (
    (r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-)[A-Za-z0-9_-]{16,}", HIDDEN),
    (r"\bAKIA[0-9A-Z]{16}\b", HIDDEN),
    (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", HIDDEN),
    (r"(\bBearer )[A-Za-z0-9._~+/-]{8,}=*", rf"\1{HIDDEN}"),
    (r"(://)[^/\s@'\"]+@", rf"\1{HIDDEN}@"),
    (
        r"(?i)((?:api[_-]?key|passw(?:or)?d|secret|(?:access|auth)[_-]token)[\"']?\s*[=:]\s*[\"']?)"
        r"[^\s\"',;]{6,}",
        rf"\1{HIDDEN}",
    ),
)
"""What tokens, keys and passwords look like where they are printed, and what stands there."""

# A shorter text that is hidden everywhere would take too much along.
_SHORTEST_SECRET: Final = 6
_SHORTEST_NAME: Final = 3
_NOBODYS_NAMES: Final = frozenset(
    ("root", "user", "users", "admin", "ubuntu", "home", "nobody", "runner", "localhost", "jax")
)


@dataclass(frozen=True)
class Hiding:
    """What is hidden, in the order in which it is looked for: a pattern, and what it becomes."""

    rules: tuple[tuple[re.Pattern[str], str], ...] = ()

    def text(self, text: str) -> str:
        """Return a text as it may be shown."""
        for pattern, shown in self.rules:
            text = pattern.sub(shown, text)
        return text

    def hides_in(self, content: bytes) -> bool:
        """Return whether there is something to hide in what is not text."""
        text = content.decode("latin-1")
        return any(pattern.search(text) for pattern, _ in self.rules)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables as they may be shown, by name."""
        return {
            self.text(name): self.text(value) if not self.rules or is_harmless(name) else HIDDEN
            for name, value in sorted(variables.items())
        }

    def words(self, words: Sequence[str]) -> list[str]:
        """Return a command as it may be shown: also without what follows ``--api-key`` and such."""
        shown = []
        for before, word in zip(("", *words), words, strict=False):
            option, equals, value = word.partition("=")
            if not self.rules:
                shown.append(word)
            elif _is_secret_option(before) and not word.startswith("-"):
                shown.append(HIDDEN)
            elif equals and value and _is_secret_option(option):
                shown.append(f"{option}={HIDDEN}")
            else:
                shown.append(self.text(word))
        return shown


def hiding(variables: Mapping[str, str], host: str = "") -> Hiding:
    """Return what is to be hidden where a program ran with these environment variables.

    Args:
        variables: The variables.
        host: The name of the machine; by default what it calls itself.
    """
    rules: dict[re.Pattern[str], str] = {}
    for secret, name in _secrets(variables):
        rules[re.compile(re.escape(secret))] = f"(hidden: {re.sub(r'[^A-Za-z0-9_]', '_', name)})"
    rules |= {re.compile(pattern): shown for pattern, shown in _SHAPES}
    homes = {variables.get("HOME", ""), os.path.expanduser("~")}
    homes |= {os.path.realpath(home) for home in homes if home}
    for home in sorted((home.rstrip("/") for home in homes), key=len, reverse=True):
        if home:
            # `/root` is also the end of another path; `/home/ann` may follow anything.
            start = r"(?<![\w.-])" if home.count("/") == 1 else ""
            rules[re.compile(rf"{start}{re.escape(home)}(?!\w)")] = "~"
    users = {Path(home).name for home in homes} | {variables.get("USER", ""), _user()}
    host = host or socket.gethostname()
    for names, shown in ((users, "(user)"), ({host, host.partition(".")[0]}, "(host)")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) >= _SHORTEST_NAME and name.lower() not in _NOBODYS_NAMES:
                boundary = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
                rules[re.compile(boundary)] = shown
    return Hiding(tuple(rules.items()))


def is_harmless(name: str) -> bool:
    """Return whether the value of an environment variable may be shown."""
    if _SECRET_NAME.search(name) or _PLACE_NAME.search(name):
        return False
    return steers(name) or name in _HARMLESS_NAMES or name.startswith(_HARMLESS)


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and _SECRET_NAME.search(word) is not None


def _secrets(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the lines of what is secret by its variable's name, the longest first, and that."""
    secrets = {
        line.strip(): name
        for name, value in variables.items()
        if _SECRET_NAME.search(name) and not os.path.exists(value)
        for line in value.splitlines()
        if len(line.strip()) >= _SHORTEST_SECRET
    }
    return sorted(secrets.items(), key=lambda row: -len(row[0]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user that this machine does not know
        return ""

"""Completion in a shell: eval "$(python train.py -sc install=bash)" completes what --help lists, for all programs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from embodied.commands import NAMES
from embodied.errors import UserError

SHELLS = "bash", "zsh"
SCRIPT = """\
_embodied() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" word="${{COMP_WORDS[COMP_CWORD]}}" words
    read -ra words <<< "$line"
    COMPREPLY=()
    if [[ ${{words[0]##*/}} == embodied && $COMP_CWORD == 1 ]]; then
        COMPREPLY=($(compgen -W "{names}" -- "$word"))
        return
    fi
    local name="${{words[1]##*/}}"
    [[ " {names} " == *" ${{name%.py}} "* ]] || return
    local found
    found=$(COMP_LINE="$line" "${{words[@]:0:2}}" -sc query={shell} 2>/dev/null) || return
    [[ $word == "=" ]] && word=""
    COMPREPLY=($(compgen -W "$found" -- "$word"))
}}
complete -o nospace -o default -F _embodied embodied python python3 .venv/bin/python .venv/bin/embodied"""
"""Script for completion; in Bash the value after = is a separate word."""


def completion(request: str, describe: Callable[[list[str]], str]) -> str:
    """Output of -sc `request`: a script to evaluate, or words that continue the line in COMP_LINE.

    Raises:
        UserError: for anything but install, uninstall or query of a known shell.
    """
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in SHELLS:
        shells = ", ".join(SHELLS)
        raise UserError(f"expected -sc install=SHELL or uninstall=SHELL, SHELL one of {shells}, got {request}")
    if action == "query":
        return "\n".join(candidates(os.environ.get("COMP_LINE", ""), describe))
    if action == "uninstall":
        return "complete -r embodied python python3 .venv/bin/python .venv/bin/embodied"
    prefix = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return prefix + SCRIPT.format(names=" ".join(NAMES), shell=shell)


def candidates(line: str, describe: Callable[[list[str]], str]) -> list[str]:
    """Words that can replace the last one of `line`: names of options up to the next dot, or values.

    `describe` returns the text of --help for the other words.
    """
    words = line.split()[2:]
    last = "" if line.endswith(" ") or not words else words.pop()
    key, equals, value = last.partition("=")
    try:
        text = describe([word for word in words if "=" in word])
    except UserError:
        text = describe([])
    options = dict(re.findall(r"^([\w.]+)=(\S*)", text, re.MULTILINE))
    choices = {group: names.split(", ") for group, names in re.findall(r"^(\w+): ([\w, ]+)$", text, re.MULTILINE)}
    if equals:
        values = choices.get(key) or (["true", "false"] if options.get(key) in ("true", "false") else [])
        return [each for each in values if each.startswith(value)]
    level = len(key.rpartition(".")[0]) + 1 if "." in key else 0
    prefixes = [f"{group}=" for group in choices]
    for option in options:
        head, dot, _ = option[level:].partition(".")
        prefixes.append(f"{option[:level]}{head}{dot or '='}")
    return [each for each in dict.fromkeys(prefixes) if each.startswith(key)]

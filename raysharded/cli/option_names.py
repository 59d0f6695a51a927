"""The library's error messages in the words of the command that called it.

The library names a value as its Python caller does: `pack: input_format='xml'`, `EngineConfig.param_dtype='int3'`. The
user of a command gave `--format xml`, `--param-dtype int3`. A phrase `name=value` is translated if `name` is the
command's parameter and the user gave it this value; then also where the message advises another value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_VALUE = r"""'[^']*'|"[^"]*"|\([^()]*\)|\[[^\[\]]*\]|[^\s,;:()]*[^\s,;:().]"""
_PHRASE = re.compile(rf"(?:^[A-Za-z][\w.]*: |(?<![\w.(])[A-Z]\w*\.(?:\w+\.)?|(?<![\w.(]))([a-z]\w*)=({_VALUE})")
"""`name=value` with the function or class before it; not in a call, which is code to write."""
_SUBJECT = re.compile(r"^([a-z]\w*) (?='[^']*':)")
"""`name 'value':`, at the beginning of a message."""
_CHOICES = re.compile(r"one of ((?:None|'[^']*')(?:, (?:None|'[^']*'))*)")
_ADVICE = re.compile(r"[;,]? or (?:give|set) (\w+)=(?:True|False)(?=[.;,])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A parameter of a command."""

    written: str
    """Its name on the command line: `--format`, or an argument's metavar."""
    value: Any = None
    """The value that the user gave; None without one."""
    negative: str = ""
    """The switch that turns it off, if there is one."""
    is_switch: bool = False

    def has(self, text: str) -> bool:
        """Whether a value in a message is the one that the user gave."""
        given = self.value.value if isinstance(self.value, Enum) else self.value
        return given is not None and text in (repr(given), str(given))

    def phrase(self, text: str) -> str:
        """The option with a value, as it is written on the command line."""
        if not self.is_switch:
            return f"{self.written} {unquoted(text)}"
        return self.written if text == "True" else self.negative or f"no {self.written}"


@dataclass(frozen=True, slots=True)
class Wording:
    """The words of a command."""

    command: str
    options: Mapping[str, Option]
    """Its options and arguments, by their Python names."""

    def of(self, message: str) -> str:
        """The message with the command's options instead of Python's names, where it speaks of them."""
        told = re.sub(rf"^(?:Run\.\w+|{re.escape(self.command)})(?:\(\))?: ", "", message)
        told = _SUBJECT.sub(lambda found: f"{found[1]}=" if found[1] in self.options else found[0], told)
        named = {name for name, text in _PHRASE.findall(told) if name in self.options and self.options[name].has(text)}
        named |= {name for name, option in self.options.items() if option.is_switch}
        told = translated(told, {name: self.options[name].phrase for name in named})
        return _ADVICE.sub(lambda found: found[0] if found[1] in self.options else "", told)


def wording_of(context: Any) -> Wording:  # typer's own class of contexts, or click's
    """The words of the command in a context, with the values that its user gave."""
    found = {}
    for param in context.command.params:
        source = context.get_parameter_source(param.name)
        given = source is not None and source.name == "COMMANDLINE"
        is_argument = param.param_type_name == "argument"
        found[param.name] = Option(
            written=_metavar(param) if is_argument else max(param.opts, key=len),
            value=context.params.get(param.name) if given else None,
            negative=next(iter(param.secondary_opts), ""),
            is_switch=bool(getattr(param, "is_flag", False)),
        )
    return Wording(context.command.name, found)


def translated(message: str, phrases: Mapping[str, Callable[[str], str]]) -> str:
    """The message with each phrase `name=value` replaced, and choices that follow as one types them."""
    told = _PHRASE.sub(lambda found: phrases[found[1]](found[2]) if found[1] in phrases else found[0], message)
    return told if told == message else _CHOICES.sub(lambda found: f"one of {_typed(found[1].split(', '))}", told)


def unquoted(text: str) -> str:
    """A value as one types it in a shell, if that is clear; else as Python writes it."""
    inner = text[1:-1]
    return inner if text[:1] in ("'", '"') and inner and inner.isprintable() and " " not in inner else text


def _typed(choices: Sequence[str]) -> str:
    """None is left out: it stands for an option that is not given."""
    return ", ".join(unquoted(choice) for choice in choices if choice != "None")


def _metavar(param: Any) -> str:  # as above
    return str(param.metavar or param.name.upper())

"""Layouts out of TOML files, and what is no layout."""

import re
from pathlib import Path

import pytest

from rollflow.nodes.launch.layout import LayoutProgram, read_layout


def layout(folder: Path, text: str) -> list[LayoutProgram]:
    (folder / "layout.toml").write_text(text)
    return read_layout(folder / "layout.toml")


def test_a_table_is_a_program(tmp_path: Path) -> None:
    trainer, rollouts = layout(
        tmp_path,
        """
        [trainer]
        command = "python train.py {trainer}"
        port = 7000

        [rollouts]
        command = "rollflow rollout --trainer {trainer} --name {name} --env 'a b' {{}}"
        count = 4
        """,
    )
    assert (trainer.name, trainer.count, trainer.port) == ("trainer", 1, 7000)
    assert (rollouts.name, rollouts.count, rollouts.port) == ("rollouts", 4, None)
    assert rollouts.addressed(lambda name: f"tcp://{name}:1") == [
        *("rollflow", "rollout", "--trainer", "tcp://trainer:1"),
        *("--name", "{name}", "--env", "a b", "{{}}"),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", " is empty, expected a table for each program, such as [trainer]"),
        ("[trainer", "expected TOML"),
        ("trainer = 3", ": trainer, expected a table whose name has small letters, digits and -"),
        ("[Trainer]\ncommand = 'a'", ": Trainer, expected a table whose name has small letters"),
        ("[name]\ncommand = 'a'", ": name, expected a table whose name has small letters, digits and -, and is not"),
        ("[a]", ": a.command is None, expected a string, such as 'python train.py'"),
        ("[a]\ncommand = ['a']", ": a.command is ['a'], expected a string"),
        ("[a]\ncommand = 'b \"'", ": a.command is 'b \"': No closing quotation"),
        ("[a]\ncommand = 'b'\ncount = 0", ": a.count is 0, expected a whole number from 1 on"),
        ("[a]\ncommand = 'b'\ncount = true", ": a.count is True, expected a whole number from 1 on"),
        ("[a]\ncommand = 'b'\nport = 70000", ": a.port is 70000, expected a whole number from 1 to 65535"),
        ("[a]\ncommand = 'b'\nport = 7\ncount = 2", ": a has a port and count is 2, expected 1"),
        ("[a]\ncommand = 'b'\nhttp = '80'", ": a.http is '80', expected a whole number from 1 to 65535"),
        ("[a]\ncommand = 'b'\nhttp = 80\nport = 80", ": a.http is 80, expected another port than "),
        ("[a]\ncommand = 'b'\nports = 7", ": a.ports, expected command, count, port or http"),
        ("[a]\ncommand = 'b {c}'", ": a.command has {c}, expected a program with a port: none, for no program has one"),
        (
            "[a]\ncommand = 'b {c}'\n[d]\ncommand = 'e'\nport = 7",
            ": a.command has {c}, expected a program with a port: d",
        ),
        (
            "[a]\ncommand = 'b --name={name}'",
            ": a.command has '--name={name}', expected {name} as an argument by itself",
        ),
    ],
)
def test_what_is_no_layout_is_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"layout.toml.*{re.escape(told)}"):
        layout(tmp_path, text)

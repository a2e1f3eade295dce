"""``mlx_mtp server`` with a model that does a coding agent's work by a script.

It reads ``notes.txt``, makes "three" of "two" in it, runs a command and ends, with the tools that the client offers. Which step
comes next is told by the results of tools in the conversation. Where the client offers no tools, it edits as Aider reads it, or
says a title. With ``AGENT_DRIFTS`` in the environment, the tags of each call drift in another way.
"""

import os
import re
from typing import Any

from tests.support.scripted_server import serve_script
from tests.support.tool_texts import rendered

COMMAND = "wc -l notes.txt > count.txt"
PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n one\n-two\n+three\n*** End Patch\n"
SHELL_PATCH = f"apply_patch <<'EOF'\n{PATCH}EOF"
SED, END = "sed -i s/two/three/ notes.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# The names of tools and their parameters in clients.
READERS = {"Read", "read", "read_file", "read_files", "view"}
EDITORS = {"Edit", "edit", "editor"}
SHELLS = {"Bash", "bash", "run_shell_command", "run_commands", "exec_command", "shell_command"}
PATHS = "file_path", "filePath", "path"
OLD, NEW = ("old_string", "oldString", "old_str", "old_text"), ("new_string", "newString", "new_str", "new_text")
BLOCK = "notes.txt\n```\n<<<<<<< SEARCH\ntwo\n=======\nthree\n>>>>>>> REPLACE\n```\nIt is done."
# Each step's drift of its call, as a pattern and what takes its place.
DRIFTS = [
    ("<tool_call>\n", ""),
    (r"</parameter>\n(<parameter=|</function>\n</tool_call>)", r"\1"),
    ("(?<=<parameter=)(.*)(?=>)", r'"\1"'),
]


def steps(tools: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The calls of the script, with these tools."""
    file = os.path.join(os.environ["AGENT_FOLDER"], "notes.txt")
    if tools.keys() == {"bash"}:  # mini-swe-agent, which ends by a command
        return [_shell(tools, command) for command in ("cat notes.txt", SED, COMMAND, END)]
    if tools.keys() & EDITORS:
        values = dict.fromkeys(PATHS, file) | dict.fromkeys(OLD, "two") | dict.fromkeys(NEW, "three")
        values |= {"files": [{"path": file}], "edits": [{"oldText": "two", "newText": "three"}]}
        return [*(_call(tools, names, values) for names in (READERS, EDITORS)), _shell(tools, COMMAND)]
    patch = ("apply_patch", {"input": PATCH}) if "apply_patch" in tools else _shell(tools, SHELL_PATCH)
    return [_shell(tools, "cat notes.txt"), patch, _shell(tools, COMMAND)]  # Codex


def _call(tools: dict[str, Any], names: set[str], values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call of the tool that has one of these names, with the values of its parameters."""
    (name,) = names & tools.keys()
    return name, {key: values[key] for key in tools[name]["parameters"]["properties"] if key in values}


def _shell(tools: dict[str, Any], command: str) -> tuple[str, dict[str, Any]]:
    values = {"cmd": command, "command": command, "commands": [command], "description": "Count."}
    return _call(tools, SHELLS, values) if "shell" not in tools else ("shell", {"command": ["bash", "-lc", command]})


def next_text(request: Any) -> tuple[str, bool]:
    """What the model says, and whether it thinks before."""
    if not request.tools:
        return BLOCK if "SEARCH/REPLACE" in str(request.messages) else "A title.", False
    script = steps({tool["function"]["name"]: tool["function"] for tool in request.tools})
    n_done = sum(message["role"] == "tool" for message in request.messages)
    is_last = n_done >= len(script) - (END in str(script))
    said = "It is done." if is_last else "I go on."
    if n_done < len(script):
        said = rendered(said, script[n_done : n_done + 1])
    if "AGENT_DRIFTS" in os.environ:
        said = re.sub(*DRIFTS[n_done % len(DRIFTS)], said)
    return f"Step {n_done}.\n</think>\n\n{said}", True


if __name__ == "__main__":
    serve_script(next_text)

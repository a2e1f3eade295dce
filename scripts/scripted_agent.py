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
    if "Edit" in tools:  # Claude Code
        edit = {"file_path": file, "old_string": "two", "new_string": "three"}
        return [("Read", {"file_path": file}), ("Edit", edit), ("Bash", {"command": COMMAND, "description": "Count."})]
    if "edit" in tools:  # opencode
        edit = {"filePath": file, "oldString": "two", "newString": "three"}
        return [("read", {"filePath": file}), ("edit", edit), ("bash", {"command": COMMAND, "description": "Count."})]
    patch = ("apply_patch", {"input": PATCH}) if "apply_patch" in tools else _shell(tools, SHELL_PATCH)
    return [_shell(tools, "cat notes.txt"), patch, _shell(tools, COMMAND)]  # Codex


def _shell(tools: dict[str, Any], command: str) -> tuple[str, dict[str, Any]]:
    if "exec_command" in tools:
        return "exec_command", {"cmd": command}
    if "shell_command" in tools:
        return "shell_command", {"command": command}
    return "shell", {"command": ["bash", "-lc", command]}


def next_text(request: Any) -> tuple[str, bool]:
    """What the model says, and whether it thinks before."""
    if not request.tools:
        return BLOCK if "SEARCH/REPLACE" in str(request.messages) else "A title.", False
    script = steps({tool["function"]["name"]: tool["function"] for tool in request.tools})
    n_done = sum(message["role"] == "tool" for message in request.messages)
    said = "It is done." if n_done >= len(script) else rendered("I go on.", script[n_done : n_done + 1])
    if "AGENT_DRIFTS" in os.environ:
        said = re.sub(*DRIFTS[n_done % len(DRIFTS)], said)
    return f"Step {n_done}.\n</think>\n\n{said}", True


if __name__ == "__main__":
    serve_script(next_text)

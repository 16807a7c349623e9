"""Patches: read in both forms, placed exactly, and no text makes them crash."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ToolError
from trio_agent.tools.diff import unified_diff
from trio_agent.tools.patch import FORMAT_HINT, apply_patches, parse_patch


def apply(patch: str, **texts: str) -> Any:
    return apply_patches(parse_patch(patch), texts)


def update(body: str, path: str = "f") -> str:
    return f"*** Begin Patch\n*** Update File: {path}\n{body}\n*** End Patch"


class TestEnvelope:
    def test_all_kinds_at_once(self) -> None:
        patch = (
            "*** Begin Patch\n*** Update File: a\n@@\n one\n-two\n+2\n"
            "*** Add File: n/b\n+new\n+\n*** Delete File: c\n"
            "*** Update File: d\n*** Move to: e\n*** End Patch\n"
        )
        assert apply(patch, a="one\ntwo\nthree\n", c="c", d="d\n") == {
            "a": "one\n2\nthree\n",
            "n/b": "new\n\n",
            "c": None,
            "d": None,
            "e": "d\n",
        }

    def test_hunks_stand_in_document_order(self) -> None:
        text = "x\na\nx\nb\nx\n"
        assert apply(update("@@\n-x\n+1\n@@\n-x\n+2"), f=text) == {"f": "1\na\n2\nb\nx\n"}

    def test_an_anchor_narrows_the_place(self) -> None:
        text = "def a():\n    return 1\ndef b():\n    return 1\n"
        patch = update("@@ def b():\n-    return 1\n+    return 2")
        assert apply(patch, f=text)["f"] == text[:-2] + "2\n"

    def test_the_anchor_may_be_the_first_line_of_context(self) -> None:
        assert apply(update("@@ b\n b\n-c\n+d"), f="a\nb\nc\n") == {"f": "a\nb\nd\n"}

    def test_the_end_of_the_file_picks_the_last(self) -> None:
        patch = update("@@\n-x\n+y\n*** End of File")
        assert apply(patch, f="x\na\nx\n") == {"f": "x\na\ny\n"}

    def test_only_additions_go_to_the_end(self) -> None:
        assert apply(update("+z"), f="a\n") == {"f": "a\nz\n"}

    def test_line_ends_are_kept(self) -> None:
        patch = update("@@\n a\n-b\n+B\n+C")
        assert apply(patch, f="a\r\nb\r\nc") == {"f": "a\r\nB\r\nC\r\nc"}

    @pytest.mark.parametrize("text", ["a\nb", "a\nb\n"])
    def test_a_missing_newline_at_the_end_stays_missing(self, text: Any) -> None:
        assert apply(update("@@\n-b\n+c"), f=text) == {"f": text.replace("b", "c")}

    @pytest.mark.parametrize(
        "body",
        [
            "@@\n a\n-missing\n+x",
            "@@\n-b\n+x\n@@\n-a\n+y",
            "@@ no such anchor\n-a\n+x",
            "@@\n a\n-c\n+x",
            "@@\n-a\n+a",
            "@@\n a\n-b\n+x\n*** End of File",
        ],
    )
    def test_what_does_not_fit_is_refused(self, body: Any) -> None:
        with pytest.raises(ToolError):
            apply(update(body), f="a\nb\nc\n")

    @pytest.mark.parametrize(
        "patch",
        [
            "",
            "hello",
            "*** Begin Patch",
            "*** Begin Patch\n*** End Patch",
            "*** Begin Patch\nfoo\n*** End Patch",
            update("garbage"),
            "*** Begin Patch\n*** Add File: x\nno plus\n*** End Patch",
            "*** Begin Patch\n*** Update File: x\n*** End Patch",
        ],
    )
    def test_what_is_no_patch_says_how_to_write_one(self, patch: Any) -> None:
        with pytest.raises(ToolError) as error:
            parse_patch(patch)
        assert FORMAT_HINT in str(error.value)

    def test_one_file_twice_is_refused(self) -> None:
        with pytest.raises(ToolError):
            apply(
                "*** Begin Patch\n*** Delete File: f\n*** Update File: f\n-a\n+b\n"
                "*** End Patch",
                f="a\n",
            )

    def test_work_is_bounded(self) -> None:
        text = "x\n" * 30_000
        body = "@@\n" + " x\n" * 3_000 + "-y\n+z"
        with pytest.raises(ToolError):
            apply(update(body), f=text)


LINES = st.lists(st.sampled_from(["a", "b", "c", "", "d\r"]), max_size=12)


class TestUnified:
    @given(LINES, LINES, st.booleans(), st.booleans())
    def test_our_own_diffs_apply(
        self, before: Any, after: Any, old_end: Any, new_end: Any
    ) -> None:
        old = "\n".join(before) + ("\n" if old_end and before else "")
        new = "\n".join(after) + ("\n" if new_end and after else "")
        if any(line.endswith("\r") for line in before + after):
            old, new = old.replace("\r", ""), new.replace("\r", "")
        diff = unified_diff("f", old, new)
        if not diff or not new or not old:
            return
        assert apply(diff, f=old) == {"f": new}

    @given(LINES, LINES)
    def test_our_diffs_are_what_patch_understands(self, before: Any, after: Any) -> None:
        import tempfile

        old = "".join(f"{line}\n" for line in before).replace("\r", "")
        new = "".join(f"{line}\n" for line in after).replace("\r", "")
        diff = unified_diff("f", old, new)
        if not diff:
            assert old == new
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "f")
            path.write_text(old)
            subprocess.run(
                ["git", "apply", "--unsafe-paths", "--unidiff-zero", "-"],
                input=diff.encode(),
                cwd=directory,
                check=True,
                capture_output=True,
                env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": "/"},
            )
            assert (path.read_text() if path.exists() else "") == new

    def test_line_numbers_are_only_hints(self) -> None:
        diff = "--- a/f\n+++ b/f\n@@ -7,2 +7,2 @@\n a\n-b\n+c\n"
        assert apply(diff, f="0\na\nb\n1\n") == {"f": "0\na\nc\n1\n"}

    def test_of_two_places_the_nearer_one_is_taken(self) -> None:
        diff = "--- a/f\n+++ b/f\n@@ -5,1 +5,1 @@\n-x\n+y\n"
        assert apply(diff, f="x\n1\n2\n3\nx\n") == {"f": "x\n1\n2\n3\ny\n"}

    def test_files_come_and_go(self) -> None:
        diff = (
            "--- /dev/null\n+++ b/new\n@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file\n"
            "--- a/old\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-gone\n"
        )
        assert apply(diff, old="gone\n") == {"new": "a\nb", "old": None}

    def test_a_deletion_of_other_content_is_refused(self) -> None:
        with pytest.raises(ToolError):
            apply("--- a/old\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-gone\n", old="other\n")


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(
            st.sampled_from(
                [
                    "*** Begin Patch",
                    "*** End Patch",
                    "*** Update File: f",
                    "*** Add File: g",
                    "*** Delete File: f",
                    "*** Move to: h",
                    "*** End of File",
                    "@@",
                    "@@ a",
                    "@@ -1,2 +1,2 @@",
                    "--- a/f",
                    "+++ b/f",
                    " a",
                    "-a",
                    "+a",
                    "-b",
                    "\\ No newline at end of file",
                    "",
                ]
            ),
            max_size=14,
        ).map("\n".join),
    )
)
def test_any_text_gives_a_result_or_a_tool_error(text: Any) -> None:
    try:
        patches = parse_patch(text)
        texts = {patch.path: "a\nb\n" for patch in patches if patch.action != "add"}
        result = apply_patches(patches, texts)
    except ToolError:
        return
    assert all(value is None or isinstance(value, str) for value in result.values())


def test_a_diff_of_long_texts_is_linear() -> None:
    old = "\n".join(f"line {n}" for n in range(40_000))
    new = "\n".join(f"line {n * 7 % 39_999}" for n in range(40_000))
    diff = unified_diff("f", old, new)
    assert len(diff) > len(old)

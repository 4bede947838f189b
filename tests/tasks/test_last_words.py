"""What is shown of a process that crashed or was aborted: the user's lines, and none of ours."""

from __future__ import annotations

import sysconfig

from podium.tasks import reward_process
from podium.tasks.last_words import MAX_FRAMES, MAX_TEXT, last_words

STDLIB = sysconfig.get_path("stdlib")
DUMP = f"""scoring 'abc'
Fatal Python error: Aborted

Current thread 0x00007f1d5c0b8740 (most recent call first):
  File "{STDLIB}/re/__init__.py", line 167 in match
  File "{STDLIB}/site-packages/parser/tree.py", line 30 in parse
  File "/mine/reward.py", line 7 in hangs
  File "<frozen importlib._bootstrap>", line 488 in _call_with_frames_removed
  File "/mine/reward.py", line 3 in score
  File "{STDLIB}/asyncio/base_events.py", line 720 in run_until_complete
  File "{reward_process.__file__}", line 174 in _outcome
  File "{reward_process.__file__}", line 93 in main
  File "<string>", line 1 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_of_a_dump_the_users_frames_and_what_they_called_are_left():
    words = last_words(DUMP)
    assert str(words).splitlines() == [
        "scoring 'abc'",
        "it was at (innermost call first):",
        f'  File "{STDLIB}/re/__init__.py", line 167 in match',
        f'  File "{STDLIB}/site-packages/parser/tree.py", line 30 in parse',
        '  File "/mine/reward.py", line 7 in hangs',
        '  File "/mine/reward.py", line 3 in score',
    ]
    assert words.place == "tree.py:30 in parse"  # the standard library's lines say less


def test_a_dump_with_nothing_of_the_users_is_left_out_and_has_no_place():
    ours = DUMP.replace("/mine/reward.py", f"{STDLIB}/runpy.py").replace("/site-packages", "")
    words = last_words(ours)
    assert (str(words), words.place) == ("scoring 'abc'", "")


def test_without_a_dump_it_is_what_was_printed_and_of_much_the_end():
    printed = 'Traceback:\n  File "/mine/reward.py", line 3 in score'
    assert str(last_words(f"\n{printed}\n")) == printed
    assert str(last_words("x" * 5000 + "end")).endswith("xend")
    assert len(str(last_words("x" * 5000 + "end"))) == MAX_TEXT


def test_a_recursion_is_cut():
    frames = "".join(f'  File "/mine/reward.py", line {line} in deeper\n' for line in range(1, 101))
    text = str(
        last_words(f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n{frames}  ...\n")
    )
    assert text.count("in deeper") == MAX_FRAMES
    assert text.endswith(f"  ... {100 - MAX_FRAMES} more")

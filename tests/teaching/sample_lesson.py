# %% [markdown]
# # A sample lesson
# Everything the build must cope with: an exercise, a live picture, a widget, noise, a measurement.

# %%
import sys
import time
import uuid

import ipywidgets
from IPython.display import HTML, display

from minillm.teaching import check, predict, reveal, use
from minillm.teaching.exercise import Case, Exercise, WrongVersion

EXERCISE = Exercise(
    name="l90.double",
    reference=lambda numbers: [2 * n for n in numbers],
    cases=[Case("no numbers", ([],)), Case("two numbers", ([1, 3],))],
    hints=("Think of pairs.", "Use a list comprehension.", "[… for n in numbers]", "return [2 * n for n in numbers]"),
    wrong=(
        WrongVersion("repeats the list instead of doubling its numbers", lambda numbers: numbers * 2),
        WrongVersion("squares", lambda numbers: [n * n for n in numbers]),
    ),
)

# %%
predict("l90.calls", None, unit="calls")


# %%
def double(numbers: list[int]) -> list[int]:
    """Twice each number: `double([1, 3]) == [2, 6]`."""
    ### BEGIN SOLUTION
    return [2 * n for n in numbers]
    ### END SOLUTION


# %%
check(EXERCISE)

# %% tags=["expected"] alt="A bar of length 2, then one of length 6"
chosen = use(EXERCISE)
bars = "".join(f'<rect y="{20 * i}" width="{10 * n}" height="15"/>' for i, n in enumerate(chosen([1, 3])))
handle = display(HTML("<svg>first frame</svg>"), display_id="live")
handle.update(HTML(f'<svg role="img" viewBox="0 0 100 40"><title>Bars of {chosen([1, 3])}</title>{bars}</svg>'))

# %%
display(ipywidgets.IntSlider(value=3))
print("loading 1%\rloading 100%")
print("noise on stderr", file=sys.stderr)
HTML(f'<div id="{uuid.uuid4()}">chart<script>"of a replay"</script></div>')

# %% tags=["nbval-ignore-output"]
measured = time.perf_counter()
print(measured)

# %%
reveal("l90.calls", 2)

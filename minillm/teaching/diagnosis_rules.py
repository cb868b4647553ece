"""What errors of Python, torch and Triton say of a learner's line, in plain words.

Each rule: the classes of the error, its message, and what is told; both are regular expressions that must fit wholly.
`{0}`, `{1}` … stand for the groups of the message.
"""

from __future__ import annotations

Rule = tuple[str, str, str]

PYTHON: tuple[Rule, ...] = (
    (
        "NameError|UnboundLocalError",
        r".*?'(\w+)'.*",
        "nothing is called {0} yet when this line runs: is the line that makes it missing, further down, or only in a "
        "branch?",
    ),
    (
        "IndexError",
        r"index (-?\d+) is out of bounds for (?:dimension|axis) (\d+) with size (\d+)",
        "index {0} is asked of dimension {1}, which has {2} entries; they count from 0",
    ),
    (
        "IndexError",
        r"Dimension out of range \(expected to be in range of \[-(\d+), \d+\], but got (-?\d+)\)",
        "dimension {1} is asked of a tensor that has {0}; they count from 0, or from the last, which is -1",
    ),
    ("IndexError", r"too many indices for tensor of dimension (\d+)", "the brackets name more than the {0} dimensions"),
    ("IndexError", r"pop from empty list", "takes one out of an empty list: ask first whether enough are left"),
    ("IndexError", r"tensors used as indices must be .*", "the index is a tensor that holds no whole numbers"),
    ("IndexError", r"only integers, slices.*", "what stands in the brackets is no number, no slice and no tensor"),
    ("IndexError", r"list (assignment )?index out of range", "an index reaches past the end of a list"),
    ("ZeroDivisionError", r".*", "something is divided by 0 in this case"),
    ("KeyError", r".*", "a key is looked up that is not there: is that asked first, and the right way round?"),
    ("RecursionError", r".*", "your function calls itself without an end"),
    (
        "RuntimeError",
        r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)",
        "two tensors are combined number by number, but have {0} and {1} entries in dimension {2}: is one of them "
        "transposed, cut at another place, or without an axis ([:, None])?",
    ),
    (
        "RuntimeError",
        r"The expanded size of the tensor .* Target sizes: (\[.*?\]).*Tensor sizes: (\[.*?\]).*",
        "numbers of shape {1} do not fit into a place of shape {0}: do both begin and end where they should?",
    ),
    (
        "RuntimeError",
        r"shape mismatch: value tensor of shape (\[.*?\]) cannot be broadcast to indexing result of shape (\[.*?\]).*",
        "numbers of shape {0} do not fit into a place of shape {1}: do both begin and end where they should?",
    ),
    (
        "RuntimeError",
        r"output with shape (\[.*?\]) doesn't match the broadcast shape (\[.*?\])",
        "two tensors do not fit together: one has shape {0}, with the other it would be {1}",
    ),
    (
        "RuntimeError",
        r"einsum\(\): subscript (\w) has size (\d+) for operand \d+ which does not broadcast with .* size (\d+)",
        "the letter {0} of einsum stands for {1} entries of one tensor and for {2} of another",
    ),
    ("RuntimeError", r"einsum\(\): the number of subscripts.*", "einsum has more or fewer letters than dimensions"),
    (
        "RuntimeError",
        r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)",
        "{0}×{1} times {2}×{3}: a product needs as many columns on the left as rows on the right (is one transposed?)",
    ),
    (
        "RuntimeError",
        r"expected m1 and m2 to have the same dtype, but got: (.+) != (.+)",
        "a product of {0} with {1}: both must have the same type",
    ),
    (
        "RuntimeError",
        r"Expected query, key, and value to have the same dtype.*",
        "query, key and value have different types: are they in this order?",
    ),
    (
        "RuntimeError",
        r"unflatten: Provided sizes (\[.*?\]) don't multiply up to the size of dim (-?\d+) \((\d+)\).*",
        "dimension {1} has {2} entries, which cannot be cut into {0}: is it the dimension that you mean?",
    ),
    ("RuntimeError", r"unflatten.*", "unflatten wants one dimension, and the sizes that it is cut into"),
    ("RuntimeError", r"flatten\(\) has invalid args.*", "flatten wants the first dimension before the last"),
    (
        "RuntimeError",
        r"upper bound and lower bound inconsistent with step sign",
        "arange ends before it begins: its last number is smaller than its first",
    ),
    ("RuntimeError", r"selected index k out of range", "topk is asked for more entries than there are"),
    (
        "RuntimeError",
        r"(\w+) (?:expected condition to be a boolean tensor|only supports boolean masks), but got .*dtype (\w+)",
        "{0} wants a mask of True and False, and got {1}: is a comparison missing, or are the arguments in "
        "another order?",
    ),
    (
        "RuntimeError|ValueError",
        r"(?:a Tensor with \d+ elements cannot be converted to Scalar|only one element tensors can be converted.*)",
        "one number is wanted where a tensor holds several: sum it, or choose one",
    ),
    (
        "ValueError",
        r"zip\(\) argument (\d) is (longer|shorter) than argument[s]? ([\d-]+)",
        "lists that go side by side in zip have different lengths: number {0} is {1} than number {2}",
    ),
    (
        "ValueError",
        r"not enough values to unpack \(expected (\d+), got (\d+)\)",
        "of {0} values that are unpacked there are only {1}",
    ),
    (
        "ValueError",
        r"too many values to unpack \(expected (\d+).*",
        "more values are unpacked than the {0} that have names",
    ),
    ("ValueError", r"(max|min)\(\) (?:arg is an empty sequence|iterable argument is empty)", "{0} of nothing is taken"),
    ("ValueError", r"range\(\) arg 3 must not be zero", "a range goes on by 0, and so never arrives"),
    ("TypeError", r"slice indices must be .*", "a slice begins or ends at what is no whole number (/ makes fractions)"),
    ("TypeError", r"'float' object cannot be interpreted as an integer", "a fraction stands where a count is wanted"),
    (
        "TypeError",
        r"'(\w+)' object is not subscriptable",
        "brackets stand after a value of type {0}, which has no parts",
    ),
    (
        "TypeError",
        r"'(\w+)' object does not support item assignment",
        "brackets stand after a value of type {0}, whose parts cannot be set",
    ),
    ("TypeError", r"'(\w+)' object is not callable", "(…) stands after a value of type {0}, which is no function"),
    ("TypeError", r"'(\w+)' object is not iterable", "a value of type {0} is gone through, which has no parts"),
    (
        "TypeError",
        r"cannot unpack non-iterable (\w+) object",
        "right of the = is one value of type {0}, and left of it are several names",
    ),
    ("TypeError", r"list indices must be integers or slices, not (\w+)", "the index of a list is of type {0}"),
    (
        "TypeError",
        r"unsupported operand type\(s\) for (\S+): '(\w+)' and '(\w+)'",
        "{0} stands between a value of type {1} and one of type {2}",
    ),
    (
        "TypeError",
        r"can only concatenate (\w+) \(not \"(\w+)\"\) to \w+",
        "+ stands between a value of type {0} and one of type {1}",
    ),
    (
        "TypeError",
        r"'(\S+)' not supported between instances of '(\w+)' and '(\w+)'",
        "{0} compares a value of type {1} with one of type {2}",
    ),
    (
        "TypeError",
        r"(\w+)\(\) received an invalid combination of arguments - got (\(.*?\)),.*",
        "{0} does not take {1} in this order or number",
    ),
    (
        "TypeError",
        r"(\w+)\(\): argument '(\w+)' \(position \d+\) must be (.+), not (\w+)",
        "{0} wants {2} for {1}, and got {3}: are the arguments in this order?",
    ),
    ("TypeError", r"(\w+)\(\) missing .*: (.*)", "{0} is called without {1}"),
    ("TypeError", r"(\w+)\(\) got an unexpected keyword argument '(\w+)'", "{0} has no argument called {1}"),
    (
        "TypeError",
        r"expected Tensor as element \d+ in argument \d+, but got (\w+)",
        "one of the tensors to be joined is a value of type {0}",
    ),
    ("TypeError", r"unhashable type: '(\w+)'", "a value of type {0} is looked up as a key, which it cannot be"),
    ("AttributeError", r"module '([\w.]+)' has no attribute '(\w+)'", "there is no {1} in {0}"),
    ("AttributeError", r"'(\w+)' object has no attribute '(\w+)'", "a value of type {0} has no {1}"),
)
"""Errors of Python and torch; the first that fits counts."""

TRITON: tuple[Rule, ...] = (
    (
        "ValueError",
        r"program_id axis must be 0, 1, or 2 but got (-?\d+)",
        "program_id has the axes 0, 1 and 2; {0} is none of them",
    ),
    ("ValueError", r"arange's end argument must be greater.*", "tl.arange ends where it begins, or before"),
    (
        "ValueError",
        r"arange's range must be a power of 2",
        "tl.arange makes 2, 4, 8, … numbers and nothing between: is its beginning 0, and its end a block size?",
    ),
    ("ValueError", r"arange must fit in int32", "tl.arange begins below 0, or ends at a number that is too large"),
    (
        ".*Error.*",
        r"invalid operands of type (pointer<\w+>) and (?:triton\.language\.)?(float\w+)",
        "an address is combined with a fraction; only whole numbers can be added to it (/ makes fractions)",
    ),
    (
        ".*Error.*",
        r"invalid operands of type (\S+) and (?:triton\.language\.)?(\S+)",
        "{0} and {1} are combined: to an address, whole numbers can be added, and nothing else can be done with it",
    ),
    (
        "ValueError",
        r"(Mask|Value) argument cannot be block type if pointer argument is not a block",
        "there is one address and a block of lanes: what tl.arange makes is missing in the address",
    ),
    (
        "ValueError",
        r"Unsupported ptr type (?:<\[.*?\], )?(\w+)>? in `(tl\.\w+)`",
        "{1} is given numbers and no addresses: the pointer is missing in what it is given first",
    ),
    (
        "ValueError",
        r"Expected pointer argument to have shape (\[.*?\]) but got (\[.*)",
        "addresses of shape {1} are given for numbers of shape {0}: is an axis ([:, None] or [None, :]) missing?",
    ),
    (
        "ValueError",
        r"cannot convert float NaN to integer",
        "a number that must be whole is NaN: is it read from another tensor, or beyond the end of its own?",
    ),
    ("ValueError", r"too many indices for tensor of rank (\d+)", "the brackets name more than its {0} dimensions"),
    (
        "ValueError",
        r"`other` cannot be provided without `mask`",
        "tl.load has no mask, and so nothing that `other` could stand for: does the block reach beyond the end?",
    ),
    ("ValueError", r"axis (-?\d+) out of bounds for shape (\[.*)", "axis {0} is asked of a block of shape {1}"),
    (
        "TypeError",
        r"cannot add pointers together",
        "two pointers are added: an address is one pointer and whole numbers",
    ),
    (
        "ValueError",
        r"mask has unsupported dtype",
        "the mask holds numbers, and should hold True and False: compare them",
    ),
)
"""What Triton says of a kernel that it cannot run."""

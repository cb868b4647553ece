"""Rules that turn errors of Python, torch, numba and Triton into plain words about a learner's line.

A rule has a regular expression for the error's class, one for its message, and the sentence to show. Both expressions
must match in full. `{0}`, `{1}` … are the groups of the message.
"""

from __future__ import annotations

Rule = tuple[str, str, str]

PYTHON: tuple[Rule, ...] = (
    (
        "NameError",
        r"name '(\w+)' is not defined.*",
        "{0} is not defined: is it misspelt, is its import missing, or has the cell that defines it not run?",
    ),
    (
        "NameError|UnboundLocalError",
        r".*?'(\w+)'.*",
        "{0} has no value yet when this line runs: is its assignment missing, further down, or only in a branch?",
    ),
    (
        "IndexError|RuntimeError",
        r"index (-?\d+) is out of bounds for (?:dimension|axis) (\d+) with size (\d+)",
        "index {0} is out of range for dimension {1}, which has {2} entries, counted from 0",
    ),
    (
        "IndexError",
        r"Dimension out of range \(expected to be in range of \[-(\d+), \d+\], but got (-?\d+)\)",
        "dimension {1} does not exist: the tensor has {0}, counted from 0, or from the last, which is -1",
    ),
    (
        "IndexError",
        r"too many indices for tensor of dimension (\d+)",
        "the brackets hold more indices than the {0} dimensions",
    ),
    ("IndexError", r"pop from empty list", "pop from an empty list: check first whether enough entries are left"),
    ("IndexError", r"tensors used as indices must be .*", "the index is a tensor that does not hold integers"),
    ("IndexError", r"only integers, slices.*", "the index is neither an integer nor a slice nor a tensor"),
    ("IndexError", r"(\w+)(?: object)? (?:assignment )?index out of range", "an index is past the end of a {0}"),
    ("ZeroDivisionError", r".*", "something is divided by 0 in this case"),
    ("KeyError", r".*", "the key is not in the dict: is that checked first, and is the check the right way round?"),
    ("RecursionError", r".*", "your function calls itself endlessly"),
    ("StopIteration", r".*", "next found nothing in this case: its second argument is what it returns then"),
    (
        "RuntimeError",
        r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)",
        "two tensors are combined element by element, but have {0} and {1} entries in dimension {2}: is one of them "
        "transposed, sliced differently, or without an axis ([:, None])?",
    ),
    (
        "RuntimeError",
        r"The expanded size of the tensor .* Target sizes: (\[.*?\]).*Tensor sizes: (\[.*?\]).*",
        "values of shape {1} do not fit into shape {0}: do both begin and end where they should?",
    ),
    (
        "RuntimeError",
        r"shape mismatch: value tensor of shape (\[.*?\]) cannot be broadcast to indexing result of shape (\[.*?\]).*",
        "values of shape {0} do not fit into shape {1}: do both begin and end where they should?",
    ),
    (
        "RuntimeError",
        r"output with shape (\[.*?\]) doesn't match the broadcast shape (\[.*?\])",
        "values of shape {1} do not fit into a result of shape {0}: is a tensor changed in place, or has a mask other "
        "rows or columns than the scores?",
    ),
    (
        "RuntimeError",
        r"einsum\(\): subscript (\w) has size (\d+) for operand \d+ which does not broadcast with .* size (\d+)",
        "the letter {0} of einsum stands for {1} entries of one tensor and for {2} of another",
    ),
    (
        "RuntimeError",
        r"Sizes of tensors must match except in dimension (-?\d+). Expected size (\d+) but got size (\d+) .*",
        "tensors that are joined along dimension {0} must have the same size in all others, where one has {1} entries "
        "and another {2}",
    ),
    (
        "RuntimeError",
        r"shape '(\[.*\])' is invalid for input of size (\d+)",
        "a tensor of {1} numbers cannot have the shape {0}: is one of the sizes wrong?",
    ),
    ("RuntimeError", r"einsum\(\): the number of subscripts.*", "einsum has more or fewer letters than dimensions"),
    (
        "RuntimeError",
        r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)",
        "{0}×{1} times {2}×{3}: a matrix product needs as many columns on the left as rows on the right (is one "
        "transposed?)",
    ),
    (
        "RuntimeError",
        r"expected m1 and m2 to have the same dtype, but got: (.+) != (.+)",
        "a matrix product of {0} with {1}: both must have the same dtype",
    ),
    (
        "RuntimeError",
        r"Expected query, key, and value to have the same dtype.*",
        "query, key and value have different dtypes: are they in this order?",
    ),
    (
        "RuntimeError",
        r"unflatten: Provided sizes (\[.*?\]) don't multiply up to the size of dim (-?\d+) \((\d+)\).*",
        "dimension {1} has {2} entries, which cannot be split into {0}: is one of the two wrong?",
    ),
    ("RuntimeError", r"unflatten.*", "unflatten takes one dimension, and the sizes that it is split into"),
    ("RuntimeError", r"flatten\(\) has invalid args.*", "flatten takes the first dimension before the last"),
    (
        "RuntimeError",
        r"upper bound and lower bound inconsistent with step sign",
        "arange ends before it begins: its last number is smaller than its first",
    ),
    ("RuntimeError", r"selected index k out of range", "topk is asked for more entries than there are"),
    (
        "RuntimeError",
        r"(\w+) (?:expected condition to be a boolean tensor|only supports boolean masks), but got .*dtype (\w+)",
        "{0} takes a mask of True and False, and got {1}: is a comparison missing, or are the arguments in "
        "another order?",
    ),
    (
        "RuntimeError|ValueError",
        r"(?:Boolean value of Tensor with more than one value is ambiguous"
        r"|The truth value of an array with more than one element is ambiguous.*)",
        "one truth value is needed here (by if, while, and, or, not, min or max), and there are several: choose number "
        "by number with torch.where (& | ~ in place of and, or, not), or make one of them with .any() or .all()",
    ),
    (
        "RuntimeError|ValueError",
        r"(?:a Tensor with \d+ elements cannot be converted to Scalar|only one element tensors can be converted.*)",
        "one number is needed, but the tensor holds several: sum it, or choose one",
    ),
    (
        "ValueError",
        r"zip\(\) argument (\d) is (longer|shorter) than argument[s]? ([\d-]+)",
        "the lists in zip have different lengths: number {0} is {1} than number {2}",
    ),
    (
        "ValueError",
        r"not enough values to unpack \(expected (\d+), got (\d+)\)",
        "{0} values are unpacked, but there are only {1}",
    ),
    (
        "ValueError",
        r"too many values to unpack \(expected (\d+).*",
        "more values are unpacked than the {0} names on the left",
    ),
    ("ValueError", r"(max|min)\(\) (?:arg is an empty sequence|iterable argument is empty)", "{0} of no values"),
    ("ValueError", r"range\(\) arg 3 must not be zero", "the step of a range is 0"),
    ("TypeError", r"slice indices must be .*", "a slice begins or ends at a value that is no int (/ gives a float)"),
    ("TypeError", r"'float' object cannot be interpreted as an integer", "a float is given where an int is needed"),
    (
        "TypeError",
        r"'(\w+)' object is not subscriptable",
        "[…] follows a value of type {0}, which cannot be indexed",
    ),
    (
        "TypeError",
        r"'(\w+)' object does not support item assignment",
        "[…] = follows a value of type {0}, whose entries cannot be set",
    ),
    ("TypeError", r"'(\w+)' object is not callable", "(…) follows a value of type {0}, which is no function"),
    ("TypeError", r"'(\w+)' object is not iterable", "a value of type {0} is iterated over, but it has no entries"),
    (
        "TypeError",
        r"cannot unpack non-iterable (\w+) object",
        "several names are left of the =, but one value of type {0} is right of it",
    ),
    ("TypeError", r"list indices must be integers or slices, not (\w+)", "the index of a list is of type {0}"),
    (
        "TypeError",
        r"unsupported operand type\(s\) for (.+?): '(\w+)' and '(\w+)'",
        "{0} is not defined for a value of type {1} and one of type {2}",
    ),
    (
        "TypeError",
        r"can only concatenate (\w+) \(not \"(\w+)\"\) to \w+",
        "+ is not defined for a value of type {0} and one of type {1}",
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
        "{0} takes {2} for {1}, and got {3}: are the arguments in this order?",
    ),
    (
        "TypeError",
        r"(\w*sort)\(\) takes from .* positional arguments.*",
        "{0} with stable=True takes its dimension by name: dim=…",
    ),
    ("TypeError", r"([\w.<>]+)\(\) missing .*: (.*)", "{0} is called without {1}"),
    ("TypeError", r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'", "{0} has no argument called {1}"),
    (
        "TypeError",
        r"expected Tensor as element \d+ in argument \d+, but got (\w+)",
        "one of the tensors to be joined is a value of type {0}",
    ),
    ("TypeError", r"unhashable type: '(\w+)'", "a value of type {0} is used as a key, but it cannot be hashed"),
    ("AttributeError", r"module '([\w.]+)' has no attribute '(\w+)'", "there is no {1} in {0}"),
    ("AttributeError", r"'(\w+)' object has no attribute '(\w+)'", "a value of type {0} has no {1}"),
    (
        "LessonError",
        r"numba cannot compile this: .*getitem\(f32x16.*",
        "a vector has no entries to choose from: x[k] reads one number of an array",
    ),
    (
        "LessonError",
        r"numba cannot compile this: .*(?:Cannot (?:cast|unify) \w+ (?:to|and) f32x16"
        r"|i?(?:add|sub|mul|truediv)\((?:f32x16, (?:float|int)\d+|(?:float|int)\d+, f32x16)\)).*",
        "a number stands where a vector is needed: splat(number) makes one",
    ),
    (
        "LessonError",
        r"numba cannot compile this: .*No implementation of function .*\(f32x16, f32x16\).*",
        "vectors have +, -, * and /, but no += and no other operators: fma(a, b, sums) is a * b + sums",
    ),
)
"""Rules for errors of Python, torch and numba; the first that matches is used."""

TRITON: tuple[Rule, ...] = (
    (
        "ValueError",
        r"program_id axis must be 0, 1, or 2 but got (-?\d+)",
        "program_id has the axes 0, 1 and 2, but not {0}",
    ),
    ("ValueError", r"arange's end argument must be greater.*", "tl.arange ends where it begins, or before"),
    (
        "ValueError",
        r"arange's range must be a power of 2",
        "tl.arange needs a length of 2, 4, 8, …: is its beginning 0, and its end a block size?",
    ),
    ("ValueError", r"arange must fit in int32", "tl.arange begins below 0, or ends at a number that is too large"),
    (
        ".*Error.*",
        r"invalid operands of type (pointer<\w+>) and (?:triton\.language\.)?(float\w+)",
        "a pointer is combined with a float; only ints can be added to it (/ gives a float)",
    ),
    (
        ".*Error.*",
        r"invalid operands of type (\S+) and (?:triton\.language\.)?(\S+)",
        "{0} and {1} are combined: ints can be added to a pointer, and nothing else can be done with it",
    ),
    (
        "ValueError",
        r"(Mask|Value) argument cannot be block type if pointer argument is not a block",
        "there is one pointer for a block of values: the result of tl.arange is not added to the pointer",
    ),
    (
        "ValueError",
        r"Unsupported ptr type (?:<\[.*?\], )?(\w+)>? in `(tl\.\w+)`",
        "{1} is given numbers instead of pointers: the pointer is missing in its first argument",
    ),
    (
        "ValueError",
        r"Expected pointer argument to have shape (\[.*?\]) but got (\[.*)",
        "pointers of shape {1} are given for values of shape {0}: is an axis ([:, None] or [None, :]) missing?",
    ),
    (
        "ValueError",
        r"cannot convert float NaN to integer",
        "a number that must be an int is NaN: is it read from the wrong tensor, or beyond the end of the right one?",
    ),
    (
        "ValueError",
        r"too many indices for tensor of rank (\d+)",
        "the brackets hold more indices than the {0} dimensions",
    ),
    (
        "ValueError",
        r"`other` cannot be provided without `mask`",
        "tl.load has `other` but no mask that it could apply to: does the block reach beyond the end?",
    ),
    ("ValueError", r"axis (-?\d+) out of bounds for shape (\[.*)", "a block of shape {1} has no axis {0}"),
    (
        "TypeError",
        r"cannot add pointers together",
        "two pointers are added: an address is one pointer plus ints",
    ),
    (
        "ValueError",
        r"mask has unsupported dtype",
        "the mask holds numbers instead of True and False: is a comparison missing?",
    ),
    (
        "ValueError",
        r"Cannot make_shape_compatible: incompatible dimensions at index (\d+): (\d+) and (\d+)",
        "blocks with {1} and {2} entries along axis {0} are combined: is an axis ([:, None] or [None, :]) missing, or "
        "the wrong one?",
    ),
    (
        "ValueError",
        r"arange's arguments must be of type tl\.constexpr",
        "tl.arange takes constants only, such as BLOCK, and no number that is known only when the kernel runs",
    ),
    (
        "TypeError",
        r"'int' object is not iterable",
        "a pointer, a block or a number has no entries to choose from or to loop over: tl.load(pointer + …) reads "
        "memory, and range(…) counts",
    ),
    (
        "TypeError",
        r"only (?:0-dimensional|length-1) arrays can be converted to Python scalars",
        "a block stands where Python needs one number: functions of tl (tl.sqrt, tl.exp …) take blocks, and "
        "tl.store(pointer + …, …) writes them",
    ),
    (
        "TypeError",
        r"\w+\(\): argument '\w+' \(position \d+\) must be Tensor, not tensor"
        r"|didn't match because some of the arguments have invalid types: .*!tensor!.*",
        "a function of torch takes no block of a kernel: use one of tl (tl.exp, tl.max, tl.where …)",
    ),
    (
        "TypeError",
        r"unsupported operand type\(s\) for \*\*(?: or pow\(\)|=): 'tensor' and '\w+'",
        "blocks have no **: x * x is the square of x",
    ),
)
"""Rules for errors in a kernel, used before those of `PYTHON`."""

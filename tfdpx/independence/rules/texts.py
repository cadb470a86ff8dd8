"""Texts that are split into words, and words put in line, as `TextVectorization` does."""

import tensorflow as tf

from tfdpx.independence._values import NotProvable, PerExample
from tfdpx.independence.registry import whatever

SPLIT, _PADDED = "StringSplitV2", "RaggedTensorToTensor"
# What makes of each word another, or a number, with arguments that all words share.
_OF_EACH_WORD = frozenset(
    "Equal Identity LookupTableFindV2 NotEqual SelectV2 StaticRegexReplace StringLength "
    "StringLower StringStrip StringToHashBucketFast StringToHashBucketStrong StringUpper".split()
)
# A slice's begin, end, strides and masks: of places [words, 2] the rows, of a shape the first.
_FIRST_COLUMN = [0, 0], [0, 1], [1, 1], (1, 1, 2)
_FIRST = [0], [1], [1], (0, 0, 1)


def texts_of(operation):
    """The tensor of texts [rows] whose words an operation pads, each text's by themselves; or None.

    `tf.strings.split` gives the words of all texts in one tensor, and the row of each. Where every
    word is replaced alone, and the rows of words are those of the texts, `RaggedTensorToTensor` of
    a fixed length makes row i of the words of text i.

    Args:
        operation: `tf.Operation`.
    """
    if operation.type != _PADDED:
        return None
    shape, words, default, count, rows = (*operation.inputs, None, None)[:5]
    length = tf.get_static_value(shape)
    if (
        list(operation.get_attr("row_partition_types")) != [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]
        or (length is None or len(length) != 2 or length[0] != -1 or length[1] < 0)
        or default.shape.rank != 0
        or tf.get_static_value(default) is None
    ):
        return None
    words, rows, count = _word(words), _sliced(rows, _FIRST_COLUMN), _sliced(count, _FIRST)
    if None in (words, rows, count) or words.op.type != SPLIT:
        return None
    split = words.op
    of_one_split = [id(t) for t in split.outputs] == [id(rows), id(words), id(count)]
    return split.inputs[0] if of_one_split and split.inputs[1].op.type == "Const" else None


def is_of_words(operation):
    """Whether an operation on words, or on their places, takes any number of them."""
    if operation.type == "StridedSlice":
        [made] = operation.outputs
        return any(_sliced(made, how) is not None for how in (_FIRST_COLUMN, _FIRST))
    is_of_each_word = operation.type in _OF_EACH_WORD and _word(operation.outputs[0]) is not None
    return is_of_each_word or operation.type in (SPLIT, "Cast") or texts_of(operation) is not None


def _word(tensor):
    """The one tensor that operations on each word alone make `tensor` of; or None."""
    if tensor.op.type not in _OF_EACH_WORD:
        return tensor
    given = [t for t in tensor.op.inputs if t.dtype != tf.resource]
    if any(t.op.type == "Const" and t.shape.rank for t in given):
        return None
    words = {id(t): t for t in (_word(t) for t in given if t.op.type != "Const")}
    return next(iter(words.values())) if len(words) == 1 else None


def _sliced(tensor, how):
    """The tensor that `tensor` is a slice of, by constants like `how`; or None."""
    while tensor is not None and tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0] if tensor.dtype in (tf.int32, tf.int64) else None
    if tensor is None or tensor.op.type != "StridedSlice":
        return None
    operation, (*bounds, masks) = tensor.op, how
    names = ("begin_mask", "end_mask", "shrink_axis_mask")
    given = [tf.get_static_value(t) for t in operation.inputs[1:]]
    alike = all(g is not None and list(g) == b for g, b in zip(given, bounds, strict=True))
    alike &= tuple(operation.get_attr(name) for name in names) == masks
    others = (operation.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis"))
    return operation.inputs[0] if alike and not any(others) else None


@whatever(_PADDED)
def padded(site, *inputs):
    """The words of each text by themselves."""
    texts = texts_of(site.operation)
    value = None if texts is None else site.frame.known(texts)
    if not isinstance(value, PerExample) or len(value.shape) != 1:
        raise NotProvable("there is no rule for this type")
    return site.rows(value, 0)

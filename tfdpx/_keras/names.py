"""The private names of Keras and TensorFlow that this folder uses, by version and place.

If the installed Keras lacks a function that is looked up here, importing tfdpx fails with an error
that names the function. Otherwise, a wrapper in the wrong place would silently do nothing. To try
future versions, run `make smoke-test PRE=1`.
"""

import functools
import pkgutil
from typing import Any

import keras

_KERAS = "Keras 3.10 to 3.16"
_TENSORFLOW = "TensorFlow 2.16 to 2.22"

# Triples of versions, an owner as `module:attribute`, and its private names. If a constructor sets
# an attribute, the module of the class counts as the owner.
TABLE = (
    (_KERAS, "keras.src.backend:", "compute_output_spec"),
    (
        _KERAS,
        "keras.src.backend:random",
        "beta binomial categorical dropout gamma normal randint shuffle truncated_normal uniform",
    ),
    ("Keras 3.16", "keras.src.backend:ops.nn", "sparse_categorical_crossentropy"),
    ("Keras 3.10 to 3.15", "keras.src.backend:nn", "sparse_categorical_crossentropy"),
    ("Keras 3.16", "keras.src.backend:ops.numpy", "take"),
    # Not `keras.src.backend.numpy:`, which is the backend for NumPy.
    ("Keras 3.10 to 3.15", "keras.src.backend:numpy", "take"),
    (_KERAS, "keras.src.backend.common.global_state:", "get_global_attribute set_global_attribute"),
    (_KERAS, "keras.src.losses.loss:", "scale_loss_for_distribution unscale_loss_for_distribution"),
    (
        _KERAS,
        "keras.src.legacy.saving.legacy_h5_format:",
        "load_model_from_hdf5 load_weights_from_hdf5_group load_weights_from_hdf5_group_by_name "
        "save_model_to_hdf5",
    ),
    (_KERAS, "keras.src.saving.keras_saveable:", "KerasSaveable"),
    (_KERAS, "keras.src.saving.object_registration:", "get_registered_object"),
    (_KERAS, "keras.src.saving.saving_lib:", "H5IOStore _load_state _save_state"),
    (_KERAS, "keras.src.models.functional:", "Functional unpack_singleton"),
    (_KERAS, "keras.src.ops.numpy:", "Add Any Divide Multiply NotEqual Subtract"),
    (
        _KERAS,
        "keras.src.metrics.confusion_metrics:",
        "SensitivitySpecificityBase _ConfusionMatrixConditionCount",
    ),
    (_KERAS, "keras.src.metrics.iou_metrics:", "_IoUBase"),
    (_KERAS, "keras.src.ops.operation:", "_inbound_nodes _keras_history _outbound_nodes"),
    (_KERAS, "keras.src.backend.common.masking:", "_keras_mask"),
    (_KERAS, "keras.src.activations.activations:", "_keras_logits relu"),
    (
        _KERAS,
        "keras.src.layers.layer:",
        "_call_has_training_arg _clear_losses _dtype_policy _flatten_layers _loss_ids _losses "
        "_non_trainable_variables _seed_generators _trainable_variables",
    ),
    (_KERAS, "keras.src.layers.core.dense:", "_kernel"),
    (_KERAS, "keras.src.layers.core.embedding:", "_embeddings"),
    (
        _KERAS,
        "keras.src.layers.normalization.group_normalization:",
        "_apply_normalization _reshape_into_groups",
    ),
    (
        _KERAS,
        "keras.src.layers.attention.multi_head_attention:",
        "_attention_axes _inverse_sqrt_key_dim",
    ),
    (
        _KERAS,
        "keras.src.layers.attention.grouped_query_attention:",
        "_combine_equation _dot_product_equation _dropout_layer _flash_attention "
        "_inverse_sqrt_head_dim _key_dense _output_dense _query_dense _softmax _value_dense",
    ),
    (
        "Keras 3.15 to 3.16",
        "keras.src.layers.attention.multi_head_attention:",
        "_sliding_window _use_gate",
    ),
    (_KERAS, "keras.src.layers.preprocessing.index_lookup:", "_has_input_vocabulary"),
    (_KERAS, "keras.src.layers.preprocessing.text_vectorization:", "_lookup_layer"),
    (
        _KERAS,
        "keras.src.layers.preprocessing.feature_space:",
        "_is_adapted _list_adaptable_preprocessors _sublayers_built",
    ),
    (_KERAS, "keras.src.models.sequential:", "_functional"),
    (
        _KERAS,
        "keras.src.trainers.trainer:",
        "_compile_config _compile_loss _compile_metrics _compute_loss _loss_tracker "
        "_symbolic_build",
    ),
    (
        _KERAS,
        "keras.src.trainers.compile_utils:",
        "_flat_losses _flat_metrics _flat_weighted_metrics _flatten_y",
    ),
    (_KERAS, "keras.src.backend.tensorflow.trainer:", "_initial_epoch"),
    (_KERAS, "keras.src.losses.losses:", "_fn_kwargs"),
    (
        _KERAS,
        "keras.src.optimizers.base_optimizer:",
        "_get_variable_index _model_variables_moving_average "
        "_update_model_variables_moving_average",
    ),
    (_KERAS, "keras.src.backend.tensorflow.optimizer:", "_all_reduce_sum_gradients"),
    (_KERAS, "keras.src.optimizers.adam:", "_momentums _velocities"),
    (_TENSORFLOW, "tensorflow.python.trackable.base:", "_update_uid"),
    (_TENSORFLOW, "tensorflow.python.eager.context:", "FunctionCallOptions context"),
    (
        _TENSORFLOW,
        "tensorflow.python.eager.record:",
        "VariableWatcher record_operation stop_recording",
    ),
    (
        _TENSORFLOW,
        "tensorflow.python.framework.function_def_to_graph:",
        "function_def_to_graph",
    ),
    (_TENSORFLOW, "tensorflow.python.framework.ops:", "_create_graph_constant"),
    (_TENSORFLOW, "tensorflow.python.framework.ops:Graph", "_get_function _is_function"),
    (_TENSORFLOW, "tensorflow.python.data.ops.dataset_ops:DatasetV2", "_inputs"),
    (_TENSORFLOW, "tensorflow.python.data.ops.padded_batch_op:", "_padding_values"),
    (
        _TENSORFLOW,
        "tensorflow.python.ops.gen_random_ops:",
        "random_standard_normal random_uniform random_uniform_int truncated_normal",
    ),
    (_TENSORFLOW, "tensorflow.python.ops.gen_stateful_random_ops:", "rng_read_and_skip"),
    (
        _TENSORFLOW,
        "tensorflow.python.ops.parallel_for.control_flow_ops:",
        "_is_under_xla_context",
    ),
    (
        _TENSORFLOW,
        "tensorflow.python.ops.parallel_for.pfor:",
        "ConversionNotImplementedError WhileOp WhileV2 _create_op _pfor_converter_registry "
        "_process_cond_stacked _stack_tensor_list_shape _tile_variant _untile_variant wrap",
    ),
)


@functools.cache
def find(name: str) -> tuple[Any, str]:
    """Returns a pair: the module or class of the installed Keras that has `name`, and `name`.

    Raises:
        ImportError: If none of the places that `TABLE` lists has the name in the installed Keras.
    """
    places = [place for _, place, names in TABLE if name in names.split()]
    for place in places:
        try:
            owner = pkgutil.resolve_name(place)
            getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        return owner, name
    raise ImportError(
        f"tfdpx needs `{name}`, a private name of Keras, which this version has in none of "
        f"{places}. Received: Keras {keras.__version__}. Install a version that tfdpx is tested "
        "with: pip install 'keras>=3.10,<3.17'"
    )


def get(name: str) -> Any:
    """Returns the function or class `name` of the installed Keras; raises errors like `find`."""
    owner, _ = find(name)
    return getattr(owner, name)

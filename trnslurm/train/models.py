"""What the model section of a recipe has, by architecture; settings.py explains the annotations.

The keys are those of the model's configuration in transformers. Keys that are not declared are
passed on to it unchecked.
"""

from typing import Annotated, Literal

from trnslurm.train.settings import Positive, Share

Activation = Literal[
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_pytorch_tanh",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
]
"""Names in transformers' ACT2FN, without parameters of their own."""


class Gpt2:
    """Keys of GPT2Config."""

    vocab_size: Positive[int]
    """token ids that the model knows; the data may have fewer"""
    n_positions: Annotated[int, "at least 1", "at least seq_len"]
    """the longest sample"""
    n_embd: Positive[int]
    """width"""
    n_layer: Positive[int]
    """layers"""
    n_head: Annotated[int, "at least 1", "divides n_embd"]
    """attention heads"""
    activation_function: Activation
    """of the feed-forward layers"""
    embd_pdrop: Share[float]
    """dropout of the embeddings"""
    attn_pdrop: Share[float]
    """dropout of the attention's weights"""
    resid_pdrop: Share[float]
    """dropout before each residual"""
    layer_norm_epsilon: float
    """added to the variance in layer norms"""
    initializer_range: float
    """standard deviation of new parameters"""


class Bert:
    """Keys of BertConfig."""

    vocab_size: Positive[int]
    """token ids that the model knows; the data may have fewer"""
    hidden_size: Positive[int]
    """width"""
    num_hidden_layers: Positive[int]
    """layers"""
    num_attention_heads: Annotated[int, "at least 1", "divides hidden_size"]
    """attention heads"""
    intermediate_size: Positive[int]
    """width of the feed-forward layers"""
    hidden_act: Activation
    """of the feed-forward layers"""
    hidden_dropout_prob: Share[float]
    """dropout of embeddings and layers"""
    attention_probs_dropout_prob: Share[float]
    """dropout of the attention's weights"""
    max_position_embeddings: Annotated[int, "at least 1", "at least seq_len"]
    """the longest sample"""
    type_vocab_size: Annotated[int, "at least 2"]
    """kinds of segments; the data has two"""
    initializer_range: float
    """standard deviation of new parameters"""
    layer_norm_eps: float
    """added to the variance in layer norms"""


class Llama:
    """Keys of LlamaConfig."""

    vocab_size: Positive[int]
    """token ids that the model knows; the data may have fewer"""
    hidden_size: Positive[int]
    """width"""
    intermediate_size: Positive[int]
    """width of the feed-forward layers"""
    num_hidden_layers: Positive[int]
    """layers"""
    num_attention_heads: Annotated[int, "at least 1", "divides hidden_size"]
    """attention heads"""
    num_key_value_heads: Annotated[int, "at least 1", "divides num_attention_heads"]
    """heads of keys and values, which attention heads share"""
    max_position_embeddings: Annotated[int, "at least 1", "at least seq_len"]
    """the longest sample"""
    rope_theta: Positive[float]
    """base of the rotary embedding's wavelengths"""
    rms_norm_eps: float
    """added to the mean square in norms"""
    initializer_range: float
    """standard deviation of new parameters"""
    tie_word_embeddings: bool
    """use the input embeddings for the output, too"""

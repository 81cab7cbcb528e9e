"""The section model of a recipe, by architecture. settings.py explains the annotations.

The keys are those of transformers' config. Undeclared keys are passed to it unchecked.
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
"""The functions without parameters in transformers' ACT2FN."""

PublishedBert = Literal[
    "",
    "bert-base-uncased",
    "bert-base-cased",
    "bert-base-multilingual-cased",
    "bert-large-uncased",
    "bert-large-cased",
]
"""The names in trnslurm/config/models.py, which has their sizes."""
Published = Literal[
    "",
    "bert-base-uncased",
    "bert-base-cased",
    "bert-base-multilingual-cased",
    "bert-large-uncased",
    "bert-large-cased",
    "roberta-base",
    "roberta-large",
    "distilroberta-base",
    "distilbert-base-uncased",
    "distilbert-base-cased",
    "albert-base-v2",
    "albert-large-v2",
    "albert-xlarge-v2",
    "albert-xxlarge-v2",
]
"""The same, including BERT's relatives."""


class Gpt2:
    """Keys of GPT2Config."""

    vocab_size: Positive[int]
    """Number of token ids that the model knows; the data may use fewer."""
    n_positions: Annotated[int, "at least 1", "at least seq_len"]
    """The length of the longest sample."""
    n_embd: Positive[int]
    """Width."""
    n_layer: Positive[int]
    """Number of layers."""
    n_head: Annotated[int, "at least 1", "divides n_embd"]
    """Number of attention heads."""
    activation_function: Activation
    """Activation of the feed-forward layers."""
    embd_pdrop: Share[float]
    """Dropout of the embeddings."""
    attn_pdrop: Share[float]
    """Dropout of the attention weights."""
    resid_pdrop: Share[float]
    """Dropout before each residual."""
    layer_norm_epsilon: float
    """Added to the variance in layer norms."""
    initializer_range: float
    """Standard deviation of new parameters."""


class Bert:
    """Keys of BertConfig."""

    vocab_size: Positive[int]
    """Number of token ids that the model knows; the data may use fewer."""
    hidden_size: Positive[int]
    """Width."""
    num_hidden_layers: Positive[int]
    """Number of layers."""
    num_attention_heads: Annotated[int, "at least 1", "divides hidden_size"]
    """Number of attention heads."""
    intermediate_size: Positive[int]
    """Width of the feed-forward layers."""
    hidden_act: Activation
    """Activation of the feed-forward layers."""
    hidden_dropout_prob: Share[float]
    """Dropout of embeddings and layers."""
    attention_probs_dropout_prob: Share[float]
    """Dropout of the attention weights."""
    max_position_embeddings: Annotated[int, "at least 1", "at least seq_len"]
    """The length of the longest sample."""
    type_vocab_size: Annotated[int, "at least 2"]
    """Number of segment types; the data has two."""
    initializer_range: float
    """Standard deviation of new parameters."""
    layer_norm_eps: float
    """Added to the variance in layer norms."""


class Encoder(Bert):
    """The same for BERT's relatives, under BERT's names."""

    name: Published
    """A published model, whose sizes replace those below; empty: none."""
    model_type: Literal["bert", "roberta", "distilbert", "albert"]
    """The architecture."""
    embedding_size: int
    """Width of ALBERT's embeddings; 0: hidden_size."""
    type_vocab_size: int
    """Number of segment types; 0: the model has none."""
    pad_token_id: int
    """The padding token of the data."""

    REFUSED = (
        (
            {"model_type": ["bert", "roberta", "albert"], "type_vocab_size": 0},
            "only DistilBERT has no segments: use 2, or 1 for RoBERTa",
        ),
        (
            {"model_type": "distilbert", "type_vocab_size": [1, 2]},
            "DistilBERT has no segments: set model.type_vocab_size=0",
        ),
        (
            {
                "model_type": "roberta",
                "pad_token_id": 1,
                "max_position_embeddings": "less than seq_len + 2",
            },
            "RoBERTa reserves two positions: use at least seq_len + 2",
        ),
    )


class Llama:
    """Keys of LlamaConfig."""

    vocab_size: Positive[int]
    """Number of token ids that the model knows; the data may use fewer."""
    hidden_size: Positive[int]
    """Width."""
    intermediate_size: Positive[int]
    """Width of the feed-forward layers."""
    num_hidden_layers: Positive[int]
    """Number of layers."""
    num_attention_heads: Annotated[int, "at least 1", "divides hidden_size"]
    """Number of attention heads."""
    num_key_value_heads: Annotated[int, "at least 1", "divides num_attention_heads"]
    """Number of key-value heads, which the attention heads share."""
    max_position_embeddings: Annotated[int, "at least 1", "at least seq_len"]
    """The length of the longest sample."""
    rope_theta: Positive[float]
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float
    """Added to the mean square in norms."""
    initializer_range: float
    """Standard deviation of new parameters."""
    tie_word_embeddings: bool
    """Use the input embeddings for the output, too."""

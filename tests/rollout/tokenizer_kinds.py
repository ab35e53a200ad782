"""Small tokenizers of the kinds that models have, each with the control tokens ``<s>``, ``</s>``, ``<|user|>``,
``<|end|>``."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = ["<s>", "</s>", "<|user|>", "<|end|>"]
CORPUS = ["the end of a user's text is the end of it <| s> |> <s end|> ok", "1 + 2 = 3, é, 漢字"] * 5


def byte_level(in_vocabulary: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2's and Llama 3's kind; the latter's control tokens are outside the model's vocabulary, and whole words are
    taken as such."""
    core = Tokenizer(models.BPE(ignore_merges=not in_vocabulary))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    own = CONTROL if in_vocabulary else []
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=own,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_special_tokens(CONTROL)
    return finished(core)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Llama 2's kind: BPE over text whose spaces are visible, with one put before it."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *CONTROL], show_progress=False)
    )
    return finished(core)


def unigram() -> PreTrainedTokenizerFast:
    """T5's kind: pieces with scores, the control tokens among them, so that plain text can spell one."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    special = ["<unk>", *CONTROL]
    core.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return finished(core)


def finished(core: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds ``<s>`` before a text and ``</s>`` after it, as some do."""
    ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>" if core.token_to_id("<unk>") is not None else None,
        additional_special_tokens=CONTROL[2:],
    )


KINDS = {
    "byte_level": byte_level,
    "outside_the_vocabulary": lambda: byte_level(in_vocabulary=False),
    "sentence_piece": sentence_piece,
    "unigram": unigram,
}

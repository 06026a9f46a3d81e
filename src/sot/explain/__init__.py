"""See what the class token and the words look at: maps by branch, contributions, spectrum, pairs of words."""

from sot.explain.branches import BOTH, CLASS, WORDS, Branches, Contributions, branch_contributions, split_logits
from sot.explain.cam import METHODS, activation_maps
from sot.explain.evidence import Evidence, Spectrum, pair_evidence, singular_spectrum
from sot.explain.explanation import IMAGE_METHODS, MAX_PIXELS, explain_image, explain_item, explain_text, open_upload
from sot.explain.faithfulness import delete_patches, delete_words
from sot.explain.figure import columns_figure
from sot.explain.reading import TokenReading, explaining, read_image, read_text
from sot.explain.relevance import relevance_maps, token_relevance
from sot.explain.result import Column, Explanation, ImageExplanation, TextExplanation
from sot.explain.sounds import SOUND_METHODS, SoundExplanation, explain_sound
from sot.explain.words import TEXT_METHODS, Words, split_words, token_influence, word_influence

__all__ = [
    "BOTH",
    "CLASS",
    "IMAGE_METHODS",
    "MAX_PIXELS",
    "METHODS",
    "SOUND_METHODS",
    "TEXT_METHODS",
    "WORDS",
    "Branches",
    "Column",
    "Contributions",
    "Evidence",
    "Explanation",
    "ImageExplanation",
    "SoundExplanation",
    "Spectrum",
    "TextExplanation",
    "TokenReading",
    "Words",
    "activation_maps",
    "branch_contributions",
    "columns_figure",
    "delete_patches",
    "delete_words",
    "explain_image",
    "explain_item",
    "explain_sound",
    "explain_text",
    "explaining",
    "open_upload",
    "pair_evidence",
    "read_image",
    "read_text",
    "relevance_maps",
    "singular_spectrum",
    "split_logits",
    "split_words",
    "token_influence",
    "token_relevance",
    "word_influence",
]

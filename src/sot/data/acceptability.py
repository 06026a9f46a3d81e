"""A generated acceptability set: does the verb agree with its subject, whatever stands between them?

Every sentence comes with its twin that differs in the number of one verb only. Chance is one half, and the words alone
do not tell: both twins are in the same split, and no sentence is in two.
"""

from __future__ import annotations

import random

NOUNS = (
    "author boy cat chef clerk cousin doctor dog driver farmer girl guard king lawyer nurse painter pilot poet queen "
    "singer student tailor teacher uncle"
).split()
THINGS = "box cabinet car chair clock desk key lamp letter picture ship table tower wall window".split()
VERBS = "sleep laugh smile walk sing swim vanish arrive hesitate listen".split()
TRANSITIVE = "admire avoid follow greet help know like meet remember see thank visit".split()
ADJECTIVES = "old small new tall clean heavy famous quiet tired strange".split()
PREPOSITIONS = "near behind beside above below".split()
PLURALS = {"boy": "boys", "box": "boxes"}
THIRD_PERSON = {"vanish": "vanishes"}


def _noun(word: str, plural: bool) -> str:
    return PLURALS.get(word, word + "s") if plural else word


def _verb(word: str, plural: bool) -> str:
    return word if plural else THIRD_PERSON.get(word, word + "s")


def _be(plural: bool) -> str:
    return "are" if plural else "is"


def _simple(pick: random.Random, plural: bool, agree: bool) -> str:
    verb = _verb(pick.choice(VERBS), plural == agree)
    return f"the {pick.choice(ADJECTIVES)} {_noun(pick.choice(NOUNS), plural)} {verb}"


def _prepositional(pick: random.Random, plural: bool, agree: bool) -> str:
    distractor = _noun(pick.choice(THINGS), pick.random() < 0.5)
    place, adjective = pick.choice(PREPOSITIONS), pick.choice(ADJECTIVES)
    return f"the {_noun(pick.choice(THINGS), plural)} {place} the {distractor} {_be(plural == agree)} {adjective}"


def _subject_relative(pick: random.Random, plural: bool, agree: bool) -> str:
    distractor = _noun(pick.choice(NOUNS), pick.random() < 0.5)
    inner = f"that {_verb(pick.choice(TRANSITIVE), plural)} the {distractor}"
    return f"the {_noun(pick.choice(NOUNS), plural)} {inner} {_verb(pick.choice(VERBS), plural == agree)}"


def _object_relative(pick: random.Random, plural: bool, agree: bool) -> str:
    other = pick.random() < 0.5
    inner = f"that the {_noun(pick.choice(NOUNS), other)} {_verb(pick.choice(TRANSITIVE), other)}"
    return f"the {_noun(pick.choice(NOUNS), plural)} {inner} {_verb(pick.choice(VERBS), plural == agree)}"


def _coordination(pick: random.Random, plural: bool, agree: bool) -> str:
    first, second = pick.sample(NOUNS, 2)
    if plural:
        return f"the {first} and the {second} {_verb(pick.choice(VERBS), agree)}"
    return f"the {first} without the {_noun(second, True)} {_verb(pick.choice(VERBS), not agree)}"


def _question(pick: random.Random, plural: bool, agree: bool) -> str:
    distractor = _noun(pick.choice(THINGS), pick.random() < 0.5)
    place, adjective = pick.choice(PREPOSITIONS), pick.choice(ADJECTIVES)
    return f"{_be(plural == agree)} the {_noun(pick.choice(THINGS), plural)} {place} the {distractor} {adjective} ?"


CONSTRUCTIONS = (_simple, _prepositional, _subject_relative, _object_relative, _coordination, _question)


def acceptability(num_train: int = 4000, num_dev: int = 1000, seed: int = 0) -> dict[str, list[tuple[str, int]]]:
    """Sentences and labels (1 for acceptable), half of each, for `train` and `dev`."""
    pick = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[tuple[str, int]]] = {}
    for name, size in (("train", num_train), ("dev", num_dev)):
        sentences: list[tuple[str, int]] = []
        while len(sentences) < size:
            construction, plural, draw = pick.choice(CONSTRUCTIONS), pick.random() < 0.5, pick.getrandbits(64)
            good, bad = (construction(random.Random(draw), plural, agree) for agree in (True, False))
            if good not in seen and bad not in seen:
                seen |= {good, bad}
                sentences += [(good, 1), (bad, 0)]
        pick.shuffle(sentences)
        splits[name] = sentences[:size]
    return splits

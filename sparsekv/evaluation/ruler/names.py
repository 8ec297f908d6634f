"""Keys and values of needles: two-word names, numbers and UUIDs, distinct within an example."""

from __future__ import annotations

import uuid
from random import Random
from typing import Literal

Kind = Literal["words", "numbers", "uuids"]

_ADJECTIVES = """
amber ancient arctic autumn azure bitter blunt bold brave brief bright brisk bronze calm careful
chilly clever cloudy coastal copper cosmic crimson crisp curious dainty daring dim dusty eager early
earnest eastern elegant empty faded fair famous fearless fierce floral fond formal fragile frosty
gentle giddy glossy golden graceful grand hasty hazy hearty hidden hollow honest humble hungry idle
ivory jolly keen kindly lasting lavish lemon little lively lonely lucky mellow merry mighty modest
muddy narrow neat nimble noble northern odd olive orange pale patient peaceful plain playful polite
proud purple quaint quick quiet rapid rare restless rough royal rustic sandy scarlet secret sharp
shiny silent silver sleepy smooth snowy solemn southern speedy steady stormy sturdy sunny swift
tall tame tender thirsty tidy timid tiny tranquil upper vast velvet vivid warm wary western wild
windy wise witty wooden
"""
_NOUNS = """
acorn anchor apple arrow badger banjo barrel basket beacon beetle bell blanket bottle bridge bucket
button cabin camel candle canoe carpet castle cedar chapel cherry chimney clover cobbler comet
compass cottage cradle cricket crown curtain daisy dolphin donkey dragon drum eagle easel elbow
engine falcon feather fiddle flute forest fountain garden garlic giraffe glacier goblet grape
guitar hammer harbor harvest hazel hedge helmet heron island jacket jigsaw jungle kettle kitten
ladder lantern laurel lizard lobster magnet maple marble meadow melon mirror mitten monkey mountain
mushroom napkin needle nutmeg oyster paddle parrot peach pebble pencil pepper piano pigeon pillow
planet plum pocket pony poppy pumpkin puzzle quilt rabbit raven ribbon robin rocket saddle salmon
sandal scarf shovel sparrow spider spoon squirrel tablet temple thimble ticket tiger tulip tunnel
turtle umbrella valley violin wagon walnut whistle willow window zebra
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
_CONSONANTS = "bcdfghjklmnpqrstvwxz"


class Names:
    """An endless supply, the same for the same generator. Words run out after `most`."""

    def __init__(self, rng: Random, kind: Kind) -> None:
        self._rng, self._kind = rng, kind
        self._made: list[str] = []
        self._seen: set[str] = set()

    @property
    def most(self) -> int | None:
        """How many there are, or None."""
        return len(ADJECTIVES) * len(NOUNS) if self._kind == "words" else None

    def __getitem__(self, index: int) -> str:
        while len(self._made) <= index:
            name = self._draw()
            if name not in self._seen:
                self._seen.add(name)
                self._made.append(name)
        return self._made[index]

    def _draw(self) -> str:
        if self._kind == "numbers":
            return str(self._rng.randrange(1_000_000, 10_000_000))
        if self._kind == "uuids":
            return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        return f"{self._rng.choice(ADJECTIVES)} {self._rng.choice(NOUNS)}"


def consonants(rng: Random, length: int, count: int, taken: set[str]) -> list[str]:
    """`count` new strings of consonants, which are no words and in no word; added to `taken`."""
    made: list[str] = []
    while len(made) < count:
        name = "".join(rng.choice(_CONSONANTS) for _ in range(length))
        if name not in taken:
            taken.add(name)
            made.append(name)
    return made

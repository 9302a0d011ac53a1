"""Draws are pinned: a seed must give these very positions for ever, on every machine."""

from collections import Counter

import pytest

from dap_bench import UserError
from dap_bench.data.samplers import balanced, non_balanced

LABELS = [position % 10 for position in range(100)]
NON_BALANCED = [1, 3, 11, 35, 57, 61, 64, 70]
BALANCED = [32, 36, 46, 58, 72, 78]


def test_draws_are_pinned():
    assert non_balanced(LABELS, n=8, seed=0) == NON_BALANCED
    assert balanced(LABELS, classes=3, per_class=2, seed=0) == BALANCED


def test_non_balanced_is_nested_and_depends_on_the_seed():
    small, large = non_balanced(LABELS, n=10, seed=3), non_balanced(LABELS, n=50, seed=3)
    assert set(small) < set(large)
    assert len(set(large)) == 50
    assert small != non_balanced(LABELS, n=10, seed=4)


def test_balanced_takes_the_same_number_of_each_class():
    drawn = balanced(LABELS, classes=4, per_class=5, seed=1)
    assert sorted(Counter(LABELS[position] for position in drawn).values()) == [5, 5, 5, 5]
    assert drawn == sorted(set(drawn))


def test_every_image_is_equally_likely():
    counts = Counter(position for seed in range(400) for position in non_balanced(LABELS, n=10, seed=seed))
    # 400 draws of 10 from 100: 40 each, standard deviation 6
    assert len(counts) == 100
    assert min(counts.values()) > 40 - 5 * 6
    assert max(counts.values()) < 40 + 5 * 6


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(UserError, match="class 7 has 1 images, fewer than sampler.per_class=2"):
        balanced([5, 5, 7], classes=2, per_class=2, seed=0)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: non_balanced(LABELS, n=101, seed=0), r"more images than the source has \(100\)"),
        (lambda: balanced(LABELS, classes=11, per_class=1, seed=0), "use sampler.classes=10 or fewer"),
        (lambda: non_balanced(LABELS, n=0, seed=0), "sampler.n=0 must be an integer of at least 1"),
    ],
)
def test_impossible_draws(draw, words):
    with pytest.raises(UserError, match=words):
        draw()

"""Who holds the beginning of a prompt, against the texts themselves."""

from __future__ import annotations

import random

from billfish.serving.engine.prefix_index import PrefixIndex, block_hashes

BLOCK = 3


def common_blocks(a: list[int], b: list[int]) -> int:
    """How many whole blocks two texts begin with alike."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same // BLOCK


def test_holders_are_found_by_the_blocks_they_share():
    """Texts of two tokens collide often; holders grow, are cut and end, and what is found is what comparing finds."""
    rng, index, texts = random.Random(0), PrefixIndex[int](), dict[int, list[int]]()
    found_some = 0
    for step in range(600):
        holder = rng.randrange(8)
        text = texts.setdefault(holder, [])
        if rng.random() < 0.3:
            keep = rng.randrange(len(text) // BLOCK + 1)
            index.cut(holder, keep)
            del text[keep * BLOCK :]
        else:
            before = index.hashes(holder)
            more = [rng.randrange(2) for _ in range(BLOCK * rng.randrange(3))]
            index.extend(holder, block_hashes(more, BLOCK, b"me", before))
            text += more
        assert list(index.hashes(holder)) == block_hashes(text, BLOCK, b"me"), step
        known = texts[rng.choice(list(texts))]
        prompt = known[: rng.randrange(len(known) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(2 * BLOCK))]
        shared = {holder: common_blocks(prompt, text) for holder, text in texts.items()}
        expected = {
            blocks: {holder for holder, count in shared.items() if count == blocks}
            for blocks in sorted(set(shared.values()) - {0}, reverse=True)
        }
        found = {blocks: set(holders) for blocks, holders in index.longest(block_hashes(prompt, BLOCK, b"me"))}
        assert (found, list(found)) == (expected, list(expected)), step
        found_some += len(found) > 1
    assert found_some > 30


def test_tenants_and_places_have_hashes_of_their_own():
    text = [5, 5, 5] * 2
    first, second = block_hashes(text, BLOCK, b"me")
    assert first != second  # the same tokens, further on
    assert not {first, second} & set(block_hashes(text, BLOCK, b"you"))
    assert block_hashes([*text, 1, 2], BLOCK, b"me") == [first, second]  # no whole block


def test_an_index_without_holders_is_empty():
    index, hashes = PrefixIndex[str](), block_hashes(range(9), BLOCK, b"")
    index.extend("a", hashes)
    index.cut("a", 0)
    index.cut("nobody", 0)
    assert list(index.longest(hashes)) == []
    assert (index._holders, index._hashes) == ({}, {})

"""Drafting (speculative decoding): several tokens a decode step, the same answer to the bit.

A drafter proposes the next tokens, the model computes all of them in one pass, and the sampler chooses a token behind
each, with the random number that it would have without a draft. Drafted tokens are kept as long as they are the ones
that the sampler chooses. So a draft changes how fast an answer comes, and nothing else.
"""

"""Make fixed prompts whose log-probabilities identify the weights in an engine."""

from holdfast.evaluate.types.requests import Request, pack_tokens

_CANARIES = 4
_TOKENS = 24


def fixed_tokens(number: int, length: int, vocabulary: int) -> list[int]:
    """Return `length` token ids that are spread over the vocabulary and equal on all machines.

    Different values of `number` give different sequences.
    """
    return [(number * 7919 + place * 104_729 + 13) % vocabulary for place in range(length)]


def canary_requests(vocabulary: int, max_length: int) -> list[Request]:
    """Return requests for log-probabilities of fixed prompts.

    For each prompt, one request is for its second half, and one for its last token.
    """
    length = min(_TOKENS, max_length - 1)
    made = []
    for number in range(_CANARIES):
        tokens = fixed_tokens(number, length, vocabulary)
        for read in (length // 2, length - 1):
            prompt, continuation = pack_tokens(tokens[:read]), pack_tokens(tokens[read:])
            made.append(Request(kind="loglikelihood", prompt=prompt, continuation=continuation))
    return made

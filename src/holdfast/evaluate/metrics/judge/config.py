"""What a judge's proxy is told, and what it tells: all that its owner and its process agree on."""

import math

import msgspec

from holdfast.evaluate.metrics.judge.quota import QuotaLimits

ENV_TOKEN = "HOLDFAST_JUDGE_TOKEN"


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A judge and what it may be asked.

    Attributes:
        upstream: the judge's API, up to and with its version ("https://host/v1").
        journal: file of reservations and answers; one a judge (`judge_journal.journal_of`).
        evaluation_id: whose cost is limited.
        api_key_env: the environment variable that holds the judge's key; it may be unset for a local judge.
        requests_per_minute, tokens_per_minute, cost_limit, concurrency: as `QuotaLimits`; None for no limit. The cost
            is in the currency of the prices, and of this evaluation; the others hold for all that the journal knows.
        input_price, output_price: of a million tokens.
        max_tokens: of an answer whose request names no bound; the request goes out with this one.
        timeout_s: of one try.
        give_up_s: how long a request waits and is tried again before its client hears of the failure.
        host, port: where to listen; port 0 takes a free one.
    """

    upstream: str
    journal: str
    evaluation_id: str
    api_key_env: str = "OPENAI_API_KEY"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    cost_limit: float | None = None
    concurrency: int = 32
    input_price: float = 0.0
    output_price: float = 0.0
    max_tokens: int = 2048
    timeout_s: float = 300.0
    give_up_s: float = 3600.0
    host: str = "127.0.0.1"
    port: int = 0

    def limits(self) -> QuotaLimits:
        """The quota's limits."""
        return QuotaLimits(
            requests_per_minute=math.inf
            if self.requests_per_minute is None
            else self.requests_per_minute,
            tokens_per_minute=math.inf
            if self.tokens_per_minute is None
            else self.tokens_per_minute,
            cost_microdollars=math.inf
            if self.cost_limit is None
            else math.floor(self.cost_limit * 1e6),
            concurrency=self.concurrency,
        )

    def cost(self, prompt_tokens: int, new_tokens: int) -> int:
        """What tokens cost, in millionths: a price of a million tokens is the millionths that one costs."""
        return math.ceil(prompt_tokens * self.input_price + new_tokens * self.output_price)


class JudgeStatistics(msgspec.Struct, kw_only=True):
    """What a proxy did in this life; `cost` of the evaluation so far, `waiting` now. `waited_s` is of all requests."""

    requests: int = 0
    answered: int = 0
    reused: int = 0
    refused: int = 0
    overloaded: int = 0
    tokens: int = 0
    cost: float = 0.0
    waiting: int = 0
    waited_s: float = 0.0

"""Define the configuration and the statistics that a judge's proxy exchanges with its owner."""

import math

import msgspec

from holdfast.evaluate.metrics.judge.quota import QuotaLimits

ENV_TOKEN = "HOLDFAST_JUDGE_TOKEN"


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configure a judge model and the limits on its use.

    Attributes:
        upstream: the URL of the judge's API, with the version ("https://host/v1").
        journal: the file of reservations and answers; one file per judge (`journal.journal_of`).
        evaluation_id: the evaluation to which `cost_limit` applies.
        api_key_env: the environment variable with the judge's API key; may be unset for a local
            judge.
        requests_per_minute, tokens_per_minute, cost_limit, concurrency: the limits, as in
            `QuotaLimits`; None for no limit. `cost_limit` is in the currency of the prices and
            applies to this evaluation; the other limits apply to all evaluations that use the
            journal.
        input_price, output_price: the prices of a million tokens.
        max_tokens: the limit on an answer's tokens, for requests that set none.
        timeout_s: the seconds that one attempt may take.
        give_up_s: the seconds of waiting and retries after which a request fails.
        host, port: the address to listen on; port 0 for a free port.
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
        """Return the quota's limits."""
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
        """Return the cost of the tokens in millionths of the currency.

        A price is per million tokens, so the cost is the price times the number of tokens.
        """
        return math.ceil(prompt_tokens * self.input_price + new_tokens * self.output_price)


class JudgeStatistics(msgspec.Struct, kw_only=True):
    """Count the work of a proxy since its start.

    `cost` is the evaluation's cost so far. `waiting` is the number of requests that wait now, and
    `waited_s` is the sum of the waiting times of all requests.
    """

    requests: int = 0
    answered: int = 0
    reused: int = 0
    refused: int = 0
    overloaded: int = 0
    tokens: int = 0
    cost: float = 0.0
    waiting: int = 0
    waited_s: float = 0.0

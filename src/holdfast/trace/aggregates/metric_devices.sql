-- Sums over the samples of each device; `device` is the device's name, which is the same in every
-- store.
SELECT
    s.cluster, s.metric, d.name AS device,
    sum(s.n)::BIGINT AS n, sum(s.sum_value) AS sum_value, sum(s.n_zero)::BIGINT AS n_zero,
    min(s.min_value) AS min_value, max(s.max_value) AS max_value
FROM (
    SELECT
        cluster, metric, device, count(*) AS n, sum(value::DOUBLE) AS sum_value,
        count(*) FILTER (value = 0) AS n_zero, min(value)::DOUBLE AS min_value, max(value)::DOUBLE AS max_value
    FROM samples
    GROUP BY ALL
) s JOIN devices d USING (cluster, device)
GROUP BY ALL

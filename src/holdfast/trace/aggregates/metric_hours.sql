-- Sums over the samples of all devices in each hour.
SELECT
    cluster, metric, date_trunc('hour', "at") AS hour,
    count(*) AS n, sum(value::DOUBLE) AS sum_value, count(*) FILTER (value = 0) AS n_zero
FROM samples
GROUP BY ALL

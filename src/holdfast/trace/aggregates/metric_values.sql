-- Counts of each value, rounded to the metric's resolution, for exact distributions that can be
-- added.
SELECT s.cluster, s.metric, round(s.value::DOUBLE, m.decimals) AS value, count(*) AS n
FROM samples s JOIN metrics m USING (metric)
GROUP BY ALL

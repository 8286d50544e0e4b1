-- How often each value occurred, rounded to the metric's resolution: exact distributions that add up.
SELECT s.cluster, s.metric, round(s.value::DOUBLE, m.decimals) AS value, count(*) AS n
FROM samples s JOIN metrics m USING (metric)
GROUP BY ALL

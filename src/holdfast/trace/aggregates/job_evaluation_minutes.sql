-- GPU evaluations submitted in each minute, numbered from the Unix epoch: the evaluations of a
-- checkpoint arrive together.
SELECT
    cluster,
    floor(epoch(submit_at) / 60)::INTEGER AS minute,
    count(*) AS n
FROM jobs
WHERE is_gpu AND type = 'Evaluation' AND submit_at IS NOT NULL
GROUP BY ALL

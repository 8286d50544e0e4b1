-- Value counts, in whole seconds, of the time from submission to start, by the UTC month of the
-- submission.
SELECT cluster, is_gpu, date_trunc('month', submit_at) AS month, round(queue_s) AS queue_s, count(*) AS n
FROM jobs
WHERE queue_s IS NOT NULL AND submit_at IS NOT NULL
GROUP BY ALL

-- Submissions in each quarter of an hour, numbered from the Unix epoch. All time zones differ from
-- UTC by whole quarters, so local hours and days are sums of these.
SELECT
    cluster,
    is_gpu,
    type,
    floor(epoch(submit_at) / 900)::INTEGER AS quarter,
    count(*) AS n
FROM jobs
WHERE submit_at IS NOT NULL
GROUP BY ALL

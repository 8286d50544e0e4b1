-- Value counts of the time from submission to start, once for each of three splits; `split` names
-- the column in `part`. One set per split keeps the rows few: their product would have nearly one
-- row per job.
WITH waits AS (
    SELECT cluster, is_gpu, type, pool, gpu_num, round(queue_s, 3) AS queue_s, gpu_time_s
    FROM jobs
    WHERE queue_s IS NOT NULL
)
SELECT
    cluster,
    is_gpu,
    CASE WHEN grouping(type) = 0 THEN 'type' WHEN grouping(pool) = 0 THEN 'pool' ELSE 'gpu_num' END AS split,
    CASE WHEN grouping(type) = 0 THEN type WHEN grouping(pool) = 0 THEN pool ELSE gpu_num::VARCHAR END AS part,
    queue_s,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM waits
GROUP BY GROUPING SETS (
    (cluster, is_gpu, queue_s, type), (cluster, is_gpu, queue_s, pool), (cluster, is_gpu, queue_s, gpu_num)
)

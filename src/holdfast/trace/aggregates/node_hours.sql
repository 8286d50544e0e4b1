-- GPUs in use on each node, as changes by each whole hour, numbered from the Unix epoch; their
-- running sum is the number in use at that time. A job's GPUs are spread evenly over its nodes,
-- because most sources have no counts per node. Jobs that run over no whole hour change nothing;
-- they are left out before their nodes are unnested, which saves most of the work.
WITH placed AS (
    SELECT
        cluster,
        nodes,
        gpu_num / len(nodes) AS gpus,
        ceil(epoch(start_at) / 3600)::INTEGER AS start_hour,
        ceil(epoch(end_at) / 3600)::INTEGER AS end_hour
    FROM jobs
    WHERE is_gpu AND len(nodes) > 0 AND start_at IS NOT NULL
        AND coalesce(end_at >= start_at, state = 'RUNNING', FALSE)
),
changes AS (
    SELECT cluster, nodes, start_hour AS hour, gpus FROM placed WHERE start_hour IS DISTINCT FROM end_hour
    UNION ALL
    SELECT cluster, nodes, end_hour, -gpus FROM placed WHERE start_hour < end_hour
)
SELECT cluster, node, hour, sum(gpus) AS sum_step
FROM (SELECT cluster, unnest(nodes) AS node, hour, gpus FROM changes)
GROUP BY ALL

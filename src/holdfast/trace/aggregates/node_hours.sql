-- GPUs in use on each node, as what changes by each whole hour (numbered from the Unix epoch): their running sum is what
-- is in use at that moment. A job's GPUs are taken as evenly spread over its nodes: sources name nodes, seldom counts.
-- Jobs that see no whole hour change nothing; leaving them out before their nodes are unfolded saves most of the work.
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

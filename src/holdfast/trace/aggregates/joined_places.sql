-- Telemetry devices of each job, and when; one row per job and device. `how` is the reason: 'gpus':
-- the job's record names its GPUs. 'whole': the job holds as many GPUs as its nodes have in
-- telemetry, so it holds all of them. 'node': a node that the job had alone for all of its time,
-- for CPUs and memory. 'shared': none of these, for GPU jobs on nodes with telemetry; the device is
-- then NULL.
WITH ran AS (
    SELECT
        cluster, job_id, coalesce(attempt, 0) AS attempt, username, type, gpu_num, start_at, end_at, gpus,
        coalesce(nodes, list_distinct(list_transform(gpus, lambda gpu: regexp_replace(gpu, '-[0-9]+$', '')))) AS nodes
    FROM jobs
    WHERE end_at > start_at AND (len(nodes) > 0 OR len(gpus) > 0)
),
on_nodes AS (
    SELECT cluster, job_id, attempt, username, type, gpu_num, start_at, end_at, unnest(nodes) AS node FROM ran
),
sizes AS (
    SELECT cluster, node, count(gpu) AS node_gpus FROM devices GROUP BY ALL
),
neighbours AS (
    SELECT
        on_nodes.*,
        coalesce(max(end_at) OVER (
            PARTITION BY cluster, node ORDER BY start_at, end_at, job_id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) <= start_at, TRUE)
        AND coalesce(lead(start_at) OVER (
            PARTITION BY cluster, node ORDER BY start_at, end_at, job_id
        ) >= end_at, TRUE) AS is_alone
    FROM on_nodes
),
named AS (
    SELECT cluster, job_id, attempt, username, type, gpu_num, start_at, end_at, unnest(gpus) AS name
    FROM ran
    WHERE len(gpus) > 0
),
whole AS (
    SELECT cluster, job_id, attempt, start_at, max(gpu_num) >= sum(node_gpus) AND max(gpu_num) > 0 AS is_whole
    FROM on_nodes
    JOIN sizes USING (cluster, node)
    ANTI JOIN named USING (cluster, job_id, attempt, start_at)
    GROUP BY ALL
)
SELECT cluster, job_id, attempt, username, type, gpu_num, start_at, end_at, 'gpus' AS how, devices.device
FROM named
JOIN devices USING (cluster, name)
WHERE devices.gpu IS NOT NULL
UNION ALL
SELECT
    cluster, job_id, attempt, on_nodes.username, on_nodes.type, on_nodes.gpu_num, start_at, on_nodes.end_at,
    'whole' AS how, devices.device
FROM on_nodes
JOIN whole USING (cluster, job_id, attempt, start_at)
JOIN devices USING (cluster, node)
WHERE whole.is_whole AND devices.gpu IS NOT NULL
UNION ALL
SELECT
    cluster, job_id, attempt, neighbours.username, neighbours.type, neighbours.gpu_num, start_at, neighbours.end_at,
    'node' AS how, devices.device
FROM neighbours
JOIN devices USING (cluster, node)
WHERE neighbours.is_alone AND devices.gpu IS NULL
UNION ALL
SELECT DISTINCT
    cluster, job_id, attempt, on_nodes.username, on_nodes.type, on_nodes.gpu_num, start_at, on_nodes.end_at,
    'shared' AS how, NULL AS device
FROM on_nodes
JOIN whole USING (cluster, job_id, attempt, start_at)
WHERE NOT whole.is_whole AND on_nodes.gpu_num > 0

-- Hours that each node worked for jobs of each size, and final states of the jobs. A job of many
-- nodes counts on each of its nodes.
WITH on_nodes AS (
    SELECT
        cluster,
        unnest(nodes) AS node,
        CAST(pow(2, ceil(log2(len(nodes)))) AS INTEGER) AS job_nodes,
        state,
        outcome = 'failed' AS is_failed,
        CASE WHEN outcome = 'failed' THEN reason END AS reason,
        CASE WHEN outcome = 'failed' THEN exit_code END AS exit_code,
        run_s
    FROM jobs
    WHERE len(nodes) > 0 AND run_s IS NOT NULL AND outcome <> 'unfinished'
)
SELECT cluster, node, job_nodes, state, is_failed, reason, exit_code, count(*) AS n, sum(run_s) AS sum_run_s
FROM on_nodes
GROUP BY ALL

-- Value counts of the CPUs and the host memory that GPU jobs requested per GPU.
SELECT
    cluster,
    type,
    round(cpu_num / gpu_num, 3) AS cpu_num_per_gpu,
    round(mem_gb / gpu_num, 3) AS mem_gb_per_gpu,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM jobs
WHERE is_gpu AND (cpu_num IS NOT NULL OR mem_gb IS NOT NULL)
GROUP BY ALL

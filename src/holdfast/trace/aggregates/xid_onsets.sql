-- Changes of the Xid gauge from no fault to a code. A code at a device's first sample began before
-- the trace and is left out.
SELECT cluster, device, "at", value::INTEGER AS code
FROM (
    SELECT
        cluster, device, "at", value,
        lag(value) OVER (PARTITION BY cluster, device ORDER BY "at") AS before
    FROM samples
    WHERE metric = 'XID_ERRORS'
)
WHERE value > 0 AND before = 0

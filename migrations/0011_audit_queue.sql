-- Is the queue sound? No row: yes. Half-way states are sound as long as an event that will move them on is waiting.
CREATE FUNCTION ci.audit() RETURNS TABLE (violation text, subject text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH place AS MATERIALIZED (
         SELECT job_id, 'blocked' AS state FROM ci.blocked UNION ALL SELECT job_id, 'ready' FROM ci.ready UNION ALL SELECT job_id, 'running' FROM ci.running),
       places AS (SELECT job_id, count(*) AS n FROM place GROUP BY job_id),
       -- Jobs that a waiting event will have looked at.
       told AS MATERIALIZED (
         SELECT subject AS job_id FROM ci.event WHERE kind IN ('e', 'u') UNION SELECT job_id FROM ci.passed_over
         UNION SELECT i.referrer FROM ci.event e JOIN ci.job j ON j.id = e.subject JOIN ci.job_input i ON i.input = j.id
           WHERE e.kind = 'o' OR (e.kind = 'd' AND j.state NOT IN ('succeeded', 'cached'))
         UNION SELECT b.job_id FROM ci.event e JOIN ci.blocked b ON b.watch = e.subject WHERE e.kind IN ('d', 'o')
         UNION SELECT w.job_id FROM ci.event e JOIN ci.want w ON w.evaluation_id = e.subject WHERE e.kind = 'v'),
       bad AS MATERIALIZED (
         SELECT DISTINCT i.referrer AS job_id FROM ci.job d JOIN ci.job_input i ON i.input = d.id WHERE d.state IN ('failed', 'dep_failed', 'cancelled')),
       unmet AS MATERIALIZED (
         SELECT DISTINCT i.referrer AS job_id FROM ci.job d JOIN ci.job_input i ON i.input = d.id WHERE d.state NOT IN ('succeeded', 'cached'))
  SELECT v.violation, v.job_id::text FROM (
    SELECT 'an open job is not in exactly one of blocked, ready and running' AS violation, j.id AS job_id
      FROM ci.job j LEFT JOIN places p ON p.job_id = j.id WHERE j.state = 'open' AND coalesce(p.n, 0) <> 1
    UNION ALL SELECT 'an ended job is still ' || p.state, p.job_id FROM place p LEFT JOIN ci.job j ON j.id = p.job_id WHERE j.state IS DISTINCT FROM 'open'
    UNION ALL SELECT 'a ready job has an input that is not there', r.job_id FROM ci.ready r JOIN unmet u USING (job_id) WHERE NOT EXISTS (SELECT FROM told t WHERE t.job_id = r.job_id)
    UNION ALL SELECT 'a blocked job waits for nothing', b.job_id FROM ci.blocked b
      WHERE b.run_at IS NULL AND NOT EXISTS (SELECT FROM ci.job w WHERE w.id = b.watch AND w.state = 'open')
        AND NOT EXISTS (SELECT FROM told t WHERE t.job_id = b.job_id) AND NOT EXISTS (SELECT FROM ci.missing m WHERE m.job_id = b.job_id)
    UNION ALL SELECT 'an open job has an input that failed', b.job_id FROM ci.blocked b JOIN bad USING (job_id) WHERE NOT EXISTS (SELECT FROM told t WHERE t.job_id = b.job_id)
    UNION ALL SELECT 'a dep-failed job has no input that failed', j.id FROM ci.job j WHERE j.state = 'dep_failed'
        AND NOT EXISTS (SELECT FROM bad b WHERE b.job_id = j.id) AND NOT EXISTS (SELECT FROM told t WHERE t.job_id = j.id)
    UNION ALL SELECT 'a dep-failed job names a root that did not fail', j.id FROM ci.job j LEFT JOIN ci.job r ON r.id = j.root
      WHERE j.state = 'dep_failed' AND r.state NOT IN ('failed', 'cancelled') AND NOT EXISTS (SELECT FROM ci.event)
    UNION ALL SELECT 'an offer of a job that is not ready', o.job_id FROM ci.offer o WHERE NOT EXISTS (SELECT FROM ci.ready r WHERE r.job_id = o.job_id)
    UNION ALL SELECT 'a ready job is not offered to a project that wants it', r.job_id FROM ci.ready r
      WHERE NOT EXISTS (SELECT FROM told t WHERE t.job_id = r.job_id)
        AND EXISTS (SELECT l.lane_id FROM ci.lanes_of(ARRAY[r.job_id]) l EXCEPT SELECT o.lane_id FROM ci.offer o WHERE o.job_id = r.job_id)
    UNION ALL SELECT 'a job is offered to a project that does not want it', o.job_id FROM ci.offer o
      WHERE NOT EXISTS (SELECT FROM told t WHERE t.job_id = o.job_id) AND NOT EXISTS (SELECT FROM ci.lanes_of(ARRAY[o.job_id]) l WHERE l.lane_id = o.lane_id)
    UNION ALL SELECT 'an offer is out of order', o.job_id FROM ci.offer o JOIN ci.job j ON j.id = o.job_id
      WHERE (o.urgency, o.shortness) <> (-j.priority, -j.height) AND NOT EXISTS (SELECT FROM told t WHERE t.job_id = o.job_id)
    UNION ALL SELECT 'an offer lies in a lane that nobody asks', o.job_id FROM ci.offer o JOIN ci.lane l ON l.id = o.lane_id WHERE NOT l.active
    UNION ALL SELECT 'an open job is wanted by nobody', b.job_id FROM place b WHERE b.state <> 'running' AND NOT ci.wanted(b.job_id) AND NOT EXISTS (SELECT FROM told t WHERE t.job_id = b.job_id)
    UNION ALL SELECT 'a succeeded job has an output that is not recorded', o.job_id FROM ci.output o JOIN ci.job j ON j.id = o.job_id
      WHERE j.state = 'succeeded' AND NOT EXISTS (SELECT FROM ci.canonical c WHERE c.path = o.path)
    UNION ALL SELECT 'a permit is held for a job that does not run', m.job_id FROM ci.permit m WHERE m.job_id IS NOT NULL AND NOT EXISTS (SELECT FROM ci.running r WHERE r.job_id = m.job_id)
    UNION ALL SELECT 'a limited job runs without a permit', r.job_id FROM ci.running r WHERE r.permit AND NOT EXISTS (SELECT FROM ci.permit m WHERE m.job_id = r.job_id)
    UNION ALL SELECT 'two open jobs make one path', min(o.job_id) FROM ci.output o JOIN place p ON p.job_id = o.job_id AND p.state <> 'blocked'
      WHERE NOT o.realised AND o.path IS NOT NULL GROUP BY o.path HAVING count(*) > 1) v
  UNION ALL SELECT 'a session builds more than its slots', s.id::text FROM ci.session s JOIN ci.running r ON r.session_id = s.id AND r.phase = 'building' GROUP BY s.id HAVING count(*) > s.slots
  UNION ALL SELECT 'a build runs for no session', r.job_id::text FROM ci.running r WHERE NOT EXISTS (SELECT FROM ci.session s WHERE s.id = r.session_id)
$$;

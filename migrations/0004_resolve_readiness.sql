-- The resolver: the only writer of `blocked` (beyond putting a job in), `ready` and `offer` (beyond a claim taking a
-- job out), of lanes and of profiles. Level-triggered: an event says where to look, never what to do; what to do is
-- read from the states as they are. One step at a time, bounded by the rows it touches, safe to kill at any point.

-- Does a live evaluation, one after p_after, want it?
CREATE FUNCTION ci.wanted(p_job bigint, p_after bigint DEFAULT 0) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM ci.want w JOIN ci.evaluation e ON e.id = w.evaluation_id
                 WHERE w.job_id = p_job AND w.evaluation_id > p_after AND e.state IN ('evaluating', 'complete'))
$$;

-- Ends jobs that will not run, out of `blocked` or `ready`. p_roots: for dep_failed, what failed first. Under the resolver's
-- lock, so that whoever comes to depend on one of them meanwhile is judged later: only those that have dependents are told of.
CREATE FUNCTION ci.retire(p_jobs bigint[], p_state ci.job_state, p_failure text DEFAULT NULL, p_error text DEFAULT NULL,
    p_roots bigint[] DEFAULT NULL) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE v_gone bigint[];
BEGIN
  IF p_jobs IS NULL THEN RETURN; END IF;
  WITH held AS (DELETE FROM ci.blocked WHERE job_id = ANY (p_jobs) RETURNING job_id),
       offered AS (DELETE FROM ci.ready WHERE job_id = ANY (ARRAY(
                     SELECT job_id FROM ci.ready WHERE job_id = ANY (p_jobs) FOR UPDATE SKIP LOCKED)) RETURNING job_id)   -- lock: retire_skips_claimed
  SELECT array_agg(job_id ORDER BY job_id) INTO v_gone FROM (SELECT * FROM held UNION ALL SELECT * FROM offered) x;
  IF v_gone IS NULL THEN RETURN; END IF;
  DELETE FROM ci.offer WHERE job_id = ANY (v_gone);
  DELETE FROM ci.missing WHERE job_id = ANY (v_gone);
  UPDATE ci.job j SET state = p_state, failure = p_failure, error = p_error, root = u.root, ended_at = ci.clock()
  FROM unnest(p_jobs, p_roots) u (id, root) WHERE j.id = u.id AND u.id = ANY (v_gone);
  INSERT INTO ci.event (kind, subject) SELECT 'd', g FROM unnest(v_gone) g
  WHERE EXISTS (SELECT FROM ci.job_input i WHERE i.input = g) OR EXISTS (SELECT FROM ci.blocked b WHERE b.watch = g);   -- event: retired_tells_dependents
  RETURN QUERY SELECT unnest(v_gone);
END $$;

-- The lanes through which jobs may be claimed: every project with a live evaluation that wants it. An outside change's
-- lane counts only where no trusted evaluation wants the job: a trusted result is never built among the untrusted.
CREATE FUNCTION ci.lanes_of(p_jobs bigint[]) RETURNS TABLE (job_id bigint, project_id int, lane_id int, evaluation_id bigint)
  LANGUAGE sql STABLE AS $$
  SELECT x.job_id, l.project_id, l.id, x.evaluation_id FROM (
    SELECT w.job_id, e.project_id, e.tier, min(e.id) AS evaluation_id, min(e.tier) OVER (PARTITION BY w.job_id) AS trust
    FROM ci.want w JOIN ci.evaluation e ON e.id = w.evaluation_id AND e.state IN ('evaluating', 'complete')
    WHERE w.job_id = ANY (p_jobs) GROUP BY w.job_id, e.project_id, e.tier) x
  JOIN ci.job j ON j.id = x.job_id
  JOIN ci.lane l ON l.project_id = x.project_id AND l.tier = x.tier AND l.class_id = j.class_id
  WHERE x.tier = x.trust                                                                    -- fence: trust
$$;

-- May a pool build the job for any of them, once that is not paused?
CREATE FUNCTION ci.may_build_job(p_pool int, p_job bigint) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM ci.lanes_of(ARRAY[p_job]) n JOIN ci.lane l ON l.id = n.lane_id JOIN ci.project pr ON pr.id = l.project_id
                 WHERE ci.may_build(pr, l.tier, p_pool))
$$;

-- Writes the offers of ready jobs whose rows the caller owns, and wakes their lanes. A lane that wakes up joins at no
-- less than the least-used active lane of its class: time spent idle is no credit.
CREATE FUNCTION ci.offer_jobs(p_jobs bigint[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE v_lanes int[]; v_tops smallint[];
BEGIN
  DELETE FROM ci.offer WHERE job_id = ANY (p_jobs);
  PERFORM ci.lay_lanes(p_jobs);
  WITH o AS (INSERT INTO ci.offer (project_id, lane_id, urgency, evaluation_id, shortness, job_id)
             SELECT n.project_id, n.lane_id, -j.priority, n.evaluation_id, -j.height, n.job_id
             FROM ci.lanes_of(p_jobs) n JOIN ci.job j ON j.id = n.job_id RETURNING lane_id, urgency)
  SELECT array_agg(lane_id), array_agg(top) INTO v_lanes, v_tops FROM (SELECT lane_id, -min(urgency) AS top FROM o GROUP BY lane_id) x;
  -- In nobody's lane: given back, or freed, after its last evaluation had ended.
  INSERT INTO ci.event (kind, subject)
  SELECT 'u', j FROM unnest(p_jobs) j WHERE NOT EXISTS (SELECT FROM ci.offer o WHERE o.job_id = j);   -- event: unwanted_is_cancelled
  IF EXISTS (SELECT FROM unnest(v_lanes, v_tops) u (id, top) JOIN ci.lane l ON l.id = u.id WHERE NOT l.active OR l.top < u.top) THEN
    UPDATE ci.lane l SET active = true, top = greatest(l.top, u.top),
      used = CASE WHEN l.active THEN l.used ELSE greatest(l.used, coalesce((
        SELECT min((m.used + m.inflight) / q.shares) FROM ci.lane m JOIN ci.project q ON q.id = m.project_id
        WHERE m.class_id = l.class_id AND m.active AND m.id <> l.id), 0) * p.shares) END
    FROM unnest(v_lanes, v_tops) u (id, top), ci.project p
    WHERE l.id = u.id AND p.id = l.project_id AND (NOT l.active OR l.top < u.top);
    PERFORM ci.rank();
  END IF;
  RETURN (SELECT array_agg(DISTINCT l.class_id) FROM ci.lane l WHERE l.id = ANY (v_lanes));
END $$;

-- Once a second: finished time into lanes, running time beside it, names' durations, nodes' speeds, and the new order.
-- What runs is charged its estimate or its age, whichever is more, so a long build weighs while it runs. At most p_rows
-- entries of the ledger at a time: if there are more, the next step goes on.
CREATE FUNCTION ci.fold(p_rows int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE v_now timestamptz := ci.clock(); v_entries ci.ledger[];
BEGIN
  WITH entry AS (DELETE FROM ci.ledger WHERE ctid = ANY (ARRAY(SELECT e.ctid FROM ci.ledger e LIMIT p_rows)) RETURNING ledger)
  SELECT coalesce(array_agg(entry.ledger), '{}') INTO v_entries FROM entry;
  WITH entry AS (SELECT * FROM unnest(v_entries)),
       spent AS (SELECT lane_id, sum(seconds) AS seconds FROM entry GROUP BY lane_id),
       flying AS (SELECT lane_id, sum(greatest(estimate, extract(epoch FROM coalesce(uploaded_at, v_now) - claimed_at))) AS seconds
                  FROM ci.running GROUP BY lane_id),
       names AS (SELECT e.seconds, e.node_id, ci.name_of(j.drv_path) AS name FROM entry e JOIN ci.job j ON j.id = e.job_id),
       speeds AS (UPDATE ci.node n SET speed = exp(0.9 * ln(n.speed) + 0.1 * s.gain)
                  FROM (SELECT node_id, avg(ln(greatest(least(d.p50 / greatest(m.seconds, 0.1), 10), 0.1))) AS gain
                        FROM names m JOIN ci.duration d USING (name) WHERE cardinality(d.recent) >= 3 AND d.p50 > 1 GROUP BY node_id) s
                  WHERE n.id = s.node_id AND n.id = ANY (ARRAY(SELECT m.id FROM ci.node m WHERE m.id IN (SELECT node_id FROM names) FOR NO KEY UPDATE SKIP LOCKED))),    -- lock: speed_skips
       -- A success ends a row of failures that were the node's own.
       recovered AS (UPDATE ci.session SET streak = 0 WHERE id = ANY (ARRAY(
                       SELECT s.id FROM ci.session s WHERE s.streak > 0 AND s.ended_at IS NULL AND s.node_id IN (SELECT node_id FROM names) FOR UPDATE SKIP LOCKED))),    -- lock: recovered_skips
       known AS (INSERT INTO ci.duration AS d (name, recent, p50)
                 SELECT name, (array_agg(seconds))[1:15], percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds) FROM names GROUP BY name
                 ON CONFLICT (name) DO UPDATE SET recent = (EXCLUDED.recent || d.recent)[1:15],
                   p50 = (SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY x) FROM unnest((EXCLUDED.recent || d.recent)[1:15]) x)),
       standing AS (SELECT l.id, coalesce(s.seconds, 0) AS more, coalesce(f.seconds, 0) AS inflight,
                      EXISTS (SELECT FROM ci.offer o WHERE o.lane_id = l.id) AS offered,
                      (SELECT -o.urgency FROM ci.offer o WHERE o.lane_id = l.id ORDER BY o.urgency LIMIT 1) AS top
                    FROM ci.lane l LEFT JOIN spent s ON s.lane_id = l.id LEFT JOIN flying f ON f.lane_id = l.id
                    WHERE l.active OR s.lane_id IS NOT NULL OR f.lane_id IS NOT NULL)
  UPDATE ci.lane l SET used = l.used + s.more, inflight = s.inflight, active = s.offered OR s.inflight > 0, top = coalesce(s.top, 0)
  FROM standing s WHERE l.id = s.id
    AND (s.more, s.inflight, s.offered OR s.inflight > 0, coalesce(s.top, 0)) IS DISTINCT FROM (0, l.inflight, l.active, l.top::int);
  IF FOUND THEN PERFORM ci.rank(); END IF;
  -- A retry avoids the node that failed it only while another live node could take it.
  UPDATE ci.ready r SET avoid = NULL WHERE r.job_id = ANY (ARRAY(
    SELECT r.job_id FROM ci.ready r WHERE r.avoid IS NOT NULL AND NOT ci.other_node(r.job_id, r.class_id, r.avoid) FOR UPDATE SKIP LOCKED));    -- lock: avoid_skips
  IF cardinality(v_entries) < p_rows THEN UPDATE ci.resolver SET folded_at = v_now; END IF;
END $$;

-- Would another node claim it, in a pool that is open to a project that wants it?
CREATE FUNCTION ci.other_node(p_job bigint, p_class int, p_node int) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM ci.session s JOIN ci.profile p ON p.id = s.profile_id
    WHERE s.ended_at IS NULL AND s.last_seen > ci.clock() - ci.lease() AND s.node_id <> p_node AND s.streak < 3
      AND p_class = ANY (p.classes) AND NOT EXISTS (SELECT FROM ci.drain d WHERE d.node_id = s.node_id AND d.session_id IN (0, s.id))
      AND ci.may_build_job(p.pool_id, p_job))                                               -- fence: other_node_open
$$;

-- Judges blocked jobs: retire, follow, watch on, or make ready. Answers the classes that gained ready jobs, and how many ended.
CREATE FUNCTION ci.judge(p_jobs bigint[], OUT classes int[], OUT ended int) LANGUAGE plpgsql AS $$
DECLARE
  v_adopt bigint[]; v_bad bigint[]; v_roots bigint[]; v_ready bigint[]; v_follow bigint[]; v_lead bigint[]; v_outgrown bigint[];
  v_large int[] := ARRAY(SELECT c.id FROM ci.class c WHERE c.memory > 0);
BEGIN
  -- Jobs that share an output with another: nothing to do if every output is canonical, else follow whoever makes it.
  -- Only a job in front of it by (depth, id) is followed while both wait, so that no two wait for each other.
  SELECT array_agg(t.job_id) FILTER (WHERE x.done), array_agg(t.job_id) FILTER (WHERE NOT x.done AND y.lead IS NOT NULL),
         array_agg(y.lead) FILTER (WHERE NOT x.done AND y.lead IS NOT NULL)
  INTO v_adopt, v_follow, v_lead
  FROM ci.twin t JOIN ci.blocked b ON b.job_id = t.job_id JOIN ci.job j ON j.id = t.job_id
  CROSS JOIN LATERAL (SELECT bool_and(c.path IS NOT NULL AND NOT EXISTS (       -- recorded, but perhaps not yet published
                        SELECT FROM ci.output p JOIN ci.running r ON r.job_id = p.job_id WHERE p.path = o.path)) AS done
                      FROM ci.output o LEFT JOIN ci.canonical c ON c.path = o.path WHERE o.job_id = t.job_id) x
  LEFT JOIN LATERAL (SELECT k.id AS lead FROM ci.output o JOIN ci.output p ON p.path = o.path AND p.job_id <> o.job_id
                JOIN ci.job k ON k.id = p.job_id AND k.state = 'open'
                WHERE o.job_id = t.job_id AND ((k.depth, k.id) < (j.depth, j.id) OR NOT EXISTS (SELECT FROM ci.blocked c WHERE c.job_id = k.id)) LIMIT 1) y ON true
  WHERE t.job_id = ANY (p_jobs);
  ended := (SELECT count(*) FROM ci.retire(v_adopt, 'succeeded'));
  -- Whoever followed one of these while it was ready or ran, but is in front of it now that both wait, looks again.
  INSERT INTO ci.event (kind, subject)
  SELECT 'e', f.job_id FROM ci.twin t JOIN ci.blocked b ON b.job_id = t.job_id JOIN ci.job j ON j.id = t.job_id
    JOIN ci.blocked f ON f.watch = t.job_id JOIN ci.job k ON k.id = f.job_id
  WHERE t.job_id = ANY (p_jobs) AND (k.depth, k.id) < (j.depth, j.id);                      -- event: follower_in_front_looks_again

  -- The worst input decides: a bad one ends the job, else the deepest unfinished one is watched, else it is ready.
  WITH verdict AS MATERIALIZED (
         SELECT b.job_id, b.watch, n.id AS input, n.state, n.root
         FROM unnest(p_jobs) c JOIN ci.blocked b ON b.job_id = c
         LEFT JOIN LATERAL (SELECT d.id, d.state, d.root FROM ci.job_input i JOIN ci.job d ON d.id = i.input
                            WHERE i.referrer = b.job_id AND d.state NOT IN ('succeeded', 'cached')
                            ORDER BY d.state = 'open', d.depth DESC LIMIT 1) n ON true
         WHERE b.job_id <> ALL (coalesce(v_follow, '{}')) OR n.state <> 'open'),
       watched AS (UPDATE ci.blocked b SET watch = v.input FROM verdict v
                   WHERE b.job_id = v.job_id AND v.state = 'open' AND b.watch IS DISTINCT FROM v.input)
  SELECT array_agg(job_id) FILTER (WHERE state <> 'open'), array_agg(coalesce(root, input)) FILTER (WHERE state <> 'open'),
         array_agg(job_id) FILTER (WHERE input IS NULL)
  INTO v_bad, v_roots, v_ready FROM verdict;

  IF v_follow IS NOT NULL THEN
    UPDATE ci.blocked b SET watch = f.lead FROM unnest(v_follow, v_lead) f (job_id, lead)
    WHERE b.job_id = f.job_id AND b.watch IS DISTINCT FROM f.lead;
  END IF;
  ended := ended + (SELECT count(*) FROM ci.retire(v_bad, 'dep_failed', p_roots => v_roots));
  IF v_ready IS NULL THEN RETURN; END IF;

  -- Not before its time, and not while a signer looks for an input that was reported missing.
  WITH out AS (DELETE FROM ci.blocked b WHERE b.job_id = ANY (v_ready)
                 AND (b.run_at IS NULL OR b.run_at <= ci.clock())                           -- fence: run_at
                 AND NOT EXISTS (SELECT FROM ci.missing m WHERE m.job_id = b.job_id)        -- fence: missing_holds
               RETURNING b.job_id),
       free AS MATERIALIZED (SELECT j.id, j.drv_path, j.class_id, j.avoid, j.failure FROM out JOIN ci.job j ON j.id = out.job_id),
       put AS (INSERT INTO ci.ready (job_id, class_id, estimate, avoid, since)
               SELECT j.id, j.class_id, coalesce((SELECT d.p50 FROM ci.duration d WHERE d.name = ci.name_of(j.drv_path)), 60),
                      CASE WHEN j.avoid IS NOT NULL AND ci.other_node(j.id, j.class_id, j.avoid) THEN j.avoid END, ci.clock()
               FROM free j)
  SELECT array_agg(id), array_agg(id) FILTER (WHERE failure = 'oom' OR class_id = ANY (v_large)) INTO v_ready, v_outgrown FROM free;
  IF v_outgrown IS NOT NULL THEN PERFORM ci.right_size(v_outgrown); END IF;
  classes := ci.offer_jobs(v_ready);
END $$;

-- Looks again at jobs that are not blocked: dep-failed ones whose inputs recovered, ready ones whose inputs were lost,
-- whose outputs are there or whose lanes changed, running ones that nobody, or somebody again, wants.
CREATE FUNCTION ci.reconsider(p_jobs bigint[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE v_jobs bigint[]; v_classes int[];
BEGIN
  -- Nobody else moves a job out of this state: no lock.
  SELECT array_agg(j.id) INTO v_jobs FROM ci.job j WHERE j.id = ANY (p_jobs) AND j.state = 'dep_failed'
    AND NOT EXISTS (SELECT FROM ci.job_input i JOIN ci.job d ON d.id = i.input
                    WHERE i.referrer = j.id AND d.state IN ('failed', 'dep_failed', 'cancelled'));
  IF v_jobs IS NOT NULL THEN
    PERFORM ci.reopen(ARRAY(SELECT j FROM unnest(v_jobs) j WHERE ci.wanted(j)));
    WITH gone AS (UPDATE ci.job SET state = 'cancelled', root = NULL, error = 'no evaluation wants it any more'
                  WHERE id = ANY (v_jobs) AND state = 'dep_failed' RETURNING id)
    INSERT INTO ci.event (kind, subject) SELECT 'o', id FROM gone;                          -- event: unwanted_tells_dependents
  END IF;
  -- Still dep-failed, but for another reason than the one it names; so are those above it.
  WITH moved AS (UPDATE ci.job j SET root = n.root
  FROM unnest(p_jobs) c CROSS JOIN LATERAL (
    SELECT coalesce(d.root, d.id) AS root FROM ci.job_input i JOIN ci.job d ON d.id = i.input
    WHERE i.referrer = c AND d.state IN ('failed', 'dep_failed', 'cancelled') ORDER BY d.depth DESC LIMIT 1) n
  WHERE j.id = c AND j.state = 'dep_failed' AND j.root <> n.root
    AND NOT EXISTS (SELECT FROM ci.job o WHERE o.id = j.root AND o.state IN ('failed', 'cancelled')) RETURNING j.id)
  INSERT INTO ci.event (kind, subject) SELECT 'o', id FROM moved;                           -- event: new_root_goes_up

  WITH mine AS MATERIALIZED (SELECT r.job_id FROM ci.ready r WHERE r.job_id = ANY (p_jobs) FOR UPDATE SKIP LOCKED),   -- lock: reconsider_skips_claimed
       lost AS MATERIALIZED (SELECT m.job_id FROM mine m WHERE EXISTS (
                SELECT FROM ci.job_input i JOIN ci.job d ON d.id = i.input
                WHERE i.referrer = m.job_id AND d.state NOT IN ('succeeded', 'cached'))
                  OR EXISTS (SELECT FROM ci.twin t WHERE t.job_id = m.job_id) AND NOT EXISTS (
                SELECT FROM ci.output o LEFT JOIN ci.canonical c ON c.path = o.path WHERE o.job_id = m.job_id AND c.path IS NULL)),
       out AS (DELETE FROM ci.ready r USING lost WHERE r.job_id = lost.job_id RETURNING r.job_id),
       unoffered AS (DELETE FROM ci.offer o USING lost WHERE o.job_id = lost.job_id),
       held AS (INSERT INTO ci.blocked (job_id) SELECT job_id FROM out RETURNING job_id),
       told AS (INSERT INTO ci.event (kind, subject) SELECT 'e', job_id FROM held)          -- event: pulled_back_is_judged
  SELECT array_agg(job_id) INTO v_jobs FROM mine WHERE job_id NOT IN (SELECT job_id FROM lost);
  -- Whatever was passed over because a builder is at it just now is looked at again: a cancel is never lost to a claim
  -- or a heartbeat in flight. In this order, for a claim that commits in between moves its job on to `running`.
  INSERT INTO ci.passed_over
  SELECT r.job_id FROM ci.ready r WHERE r.job_id = ANY (p_jobs) AND r.job_id <> ALL (coalesce(v_jobs, '{}'))
  ON CONFLICT DO NOTHING;                                                                   -- event: passed_over_ready
  IF v_jobs IS NOT NULL THEN v_classes := ci.offer_jobs(v_jobs); END IF;

  UPDATE ci.running r SET cancelled = w.unwanted
  FROM (SELECT u.job_id, NOT ci.wanted(u.job_id, u.refused) AS unwanted FROM ci.running u
        WHERE u.job_id = ANY (p_jobs) AND u.phase <> 'accepted' FOR UPDATE SKIP LOCKED) w   -- lock: cancel_skips_ending
  WHERE r.job_id = w.job_id AND r.cancelled <> w.unwanted;
  INSERT INTO ci.passed_over
  SELECT r.job_id FROM ci.running r WHERE r.job_id = ANY (p_jobs) AND r.phase <> 'accepted' AND r.cancelled = ci.wanted(r.job_id, r.refused)
  ON CONFLICT DO NOTHING;                                                                   -- event: passed_over_running
  RETURN v_classes;
END $$;

-- One step. events: -1 if another is at it, else how many were looked at; call again until 0. classes: gained ready jobs
-- or nodes, wake their builders. ended: jobs that came to an end or opened again. stops: a running build is to be stopped.
CREATE FUNCTION ci.resolve(p_rows int DEFAULT 1000) RETURNS TABLE (events int, classes int[], ended int, stops bool)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_now timestamptz := ci.clock(); v_due bool; v_batch record; v_n int; v_last bigint; v_ended int := 0;
  v_jobs bigint[]; v_of bigint[]; v_blocked bigint[]; v_others bigint[]; v_served int[];
BEGIN
  SELECT r.folded_at <= v_now - interval '1 second' INTO v_due FROM ci.resolver r FOR UPDATE SKIP LOCKED;    -- lock: one_resolver
  IF NOT FOUND THEN RETURN QUERY SELECT -1, NULL::int[], 0, false; RETURN; END IF;
  WITH due AS (UPDATE ci.blocked SET run_at = NULL WHERE job_id = ANY (ARRAY(
                 SELECT b.job_id FROM ci.blocked b WHERE b.run_at <= v_now ORDER BY b.run_at LIMIT p_rows)) RETURNING job_id)
  INSERT INTO ci.event (kind, subject) SELECT 'e', job_id FROM due;                         -- event: due_retry_is_judged
  IF v_due THEN
    WITH again AS (DELETE FROM ci.passed_over RETURNING job_id)
    INSERT INTO ci.event (kind, subject) SELECT 'u', job_id FROM again;                     -- event: passed_over_is_looked_at
  END IF;

  SELECT array_agg(x.id ORDER BY x.id) AS ids, coalesce(bool_or(x.kind IN ('v', 'u')), false) AS cancels,
         coalesce(bool_or(x.kind = 'p'), false) AS profiles, count(*) FILTER (WHERE x.kind IN ('d', 'o')) AS ends
  INTO v_batch FROM (SELECT e.id, e.kind FROM ci.event e ORDER BY e.id LIMIT p_rows) x;
  -- The gate before anything that an ingest could wait for.
  IF v_batch.cancels THEN PERFORM FROM ci.gate FOR UPDATE; END IF;                          -- lock: cancel_gate
  IF v_due THEN PERFORM ci.fold(p_rows); END IF;
  IF v_batch.ids IS NULL THEN RETURN QUERY SELECT 0, NULL::int[], 0, false; RETURN; END IF;
  IF v_batch.profiles THEN
    PERFORM ci.match_profiles();
    PERFORM ci.match_projects();
    PERFORM ci.see_capable();
    PERFORM ci.rank();
    -- Whoever asked before its kind of node was known got nothing, and would ask again when it polls.
    SELECT array_agg(DISTINCT l.class_id) INTO v_served FROM ci.lane l WHERE l.active AND EXISTS (SELECT FROM ci.offer o WHERE o.lane_id = l.id);
  END IF;

  -- Each event's fan-out in the order of job ids from its cursor on, all of them up to p_rows rows together. After a
  -- success only those that watch it can move; after a failure what waits above it, and whoever follows it; once it has
  -- been opened again (it may have succeeded by now) everything above it, dep-failed jobs too.
  SELECT array_agg(x.job_id), array_agg(x.id), count(*) INTO v_jobs, v_of, v_n FROM (
    SELECT e.id, c.job_id
    FROM unnest(v_batch.ids) u (id) JOIN ci.event e ON e.id = u.id
    LEFT JOIN ci.job j ON e.kind IN ('d', 'o') AND j.id = e.subject
    CROSS JOIN LATERAL (
      SELECT e.subject AS job_id WHERE e.kind IN ('e', 'u')
      UNION ALL (SELECT b.job_id FROM ci.blocked b WHERE e.kind = 'd' AND j.state IN ('succeeded', 'cached') AND b.watch = j.id AND b.job_id > e.cursor
                 ORDER BY b.job_id LIMIT p_rows)
      UNION ALL (SELECT y.job_id FROM (
                   (SELECT i.referrer AS job_id FROM ci.job_input i WHERE i.input = j.id AND i.referrer > e.cursor
                      AND (e.kind = 'o' OR EXISTS (SELECT FROM ci.blocked b WHERE b.job_id = i.referrer) OR EXISTS (SELECT FROM ci.ready r WHERE r.job_id = i.referrer))
                    ORDER BY 1 LIMIT p_rows)
                   UNION ALL (SELECT b.job_id FROM ci.blocked b WHERE b.watch = j.id AND b.job_id > e.cursor ORDER BY 1 LIMIT p_rows)) y
                 WHERE e.kind = 'o' OR j.state NOT IN ('succeeded', 'cached') ORDER BY y.job_id LIMIT p_rows)
      UNION ALL (SELECT w.job_id FROM ci.want w WHERE e.kind = 'v' AND w.evaluation_id = e.subject AND w.job_id > e.cursor
                 ORDER BY w.job_id LIMIT p_rows)) c
    LIMIT p_rows) x;
  IF v_n < p_rows THEN
    DELETE FROM ci.event e WHERE e.id = ANY (v_batch.ids);
  ELSE
    v_last := v_of[v_n];
    UPDATE ci.event e SET cursor = v_jobs[v_n] WHERE e.id = v_last;
    DELETE FROM ci.event e WHERE e.id = ANY (v_batch.ids) AND (e.id < v_last OR (e.id = v_last AND e.kind IN ('e', 'u')));
  END IF;

  IF v_n > 0 THEN
    IF v_batch.cancels THEN
      v_ended := (SELECT count(*) FROM ci.retire(ARRAY(SELECT DISTINCT j FROM unnest(v_jobs) j WHERE NOT ci.wanted(j)),
                    'cancelled', NULL, 'no evaluation wants it any more'));
    END IF;
    SELECT array_agg(b.job_id), array_agg(j) FILTER (WHERE b.job_id IS NULL) INTO v_blocked, v_others
    FROM (SELECT DISTINCT unnest(v_jobs) AS j ORDER BY 1) x LEFT JOIN ci.blocked b ON b.job_id = x.j;
    SELECT j.classes, v_ended + j.ended INTO classes, v_ended FROM ci.judge(v_blocked) j;
    IF v_others IS NOT NULL THEN
      classes := classes || ci.reconsider(v_others);
      stops := EXISTS (SELECT FROM ci.running r WHERE r.job_id = ANY (v_others) AND r.cancelled);
    END IF;
  END IF;
  classes := classes || v_served;
  events := cardinality(v_batch.ids);
  ended := v_batch.ends + v_ended;
  stops := coalesce(stops, false);
  RETURN NEXT;
END $$;

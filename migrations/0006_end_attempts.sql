-- How an attempt goes on and ends by the builder's own word: upload begun, given back, failed, an input missing, and the
-- log meanwhile. A builder can say that it failed, never that it succeeded. Every call names (job, attempt) under its
-- session; what is stale is left out of the answer and changes nothing.

-- The running rows that a session's fences name, locked, in the order of job ids. Waits for whoever has them: the
-- session's own words in flight, or the control plane, which is quick. Whoever locks the session's row too does so first.
CREATE FUNCTION ci.own_attempts(p_session bigint, p_jobs bigint[], p_attempts bigint[]) RETURNS SETOF ci.running LANGUAGE plpgsql AS $$
BEGIN RETURN QUERY
  SELECT r.* FROM unnest(p_jobs, p_attempts) u (job_id, attempt) JOIN ci.running r ON r.job_id = u.job_id
  WHERE r.attempt = u.attempt                                                               -- fence: attempt
    AND r.session_id = p_session                                                            -- fence: attempt_session
  ORDER BY r.job_id
  FOR UPDATE OF r;                                                                          -- lock: own_attempts
END $$;

-- Ends attempts: the running row goes, history and ledger stay. p_charge: interrupted time is free.
CREATE FUNCTION ci.end_attempts(p_jobs bigint[], p_outcome text, p_message text, p_charge bool) RETURNS void LANGUAGE plpgsql AS $$
DECLARE v_now timestamptz := ci.clock(); v_limited bigint[];
BEGIN
  WITH gone AS (DELETE FROM ci.running WHERE job_id = ANY (p_jobs) RETURNING *),
       paid AS (INSERT INTO ci.ledger (lane_id, seconds, job_id, node_id)
                SELECT lane_id, extract(epoch FROM coalesce(uploaded_at, v_now) - claimed_at), CASE WHEN p_outcome = 'succeeded' THEN job_id END, node_id
                FROM gone WHERE p_charge),
       kept AS (INSERT INTO ci.attempt (id, job_id, session_id, lane_id, claimed_at, ended_at, outcome, message)
                SELECT attempt, job_id, session_id, lane_id, claimed_at, v_now, p_outcome, p_message FROM gone)
  SELECT array_agg(job_id) INTO v_limited FROM gone WHERE permit;
  IF v_limited IS NOT NULL THEN UPDATE ci.permit SET job_id = NULL WHERE job_id = ANY (v_limited); END IF;
END $$;

-- Builds that did not end: back into the queue with interruptions + 1. Ten without an end are one.
CREATE FUNCTION ci.interrupt(p_session bigint, p_jobs bigint[], p_attempts bigint[], p_message text) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE v_jobs bigint[]; v_cancelled bigint[]; v_ends bigint[];
BEGIN
  SELECT array_agg(job_id), array_agg(job_id) FILTER (WHERE cancelled AND NOT ci.wanted(job_id, refused)) INTO v_jobs, v_cancelled
  FROM ci.own_attempts(p_session, p_jobs, p_attempts) WHERE phase <> 'accepted';            -- fence: accepted_is_kept
  IF v_jobs IS NULL THEN RETURN; END IF;
  PERFORM ci.end_attempts(v_jobs, 'interrupted', p_message, false);
  UPDATE ci.job SET interruptions = interruptions + 1 WHERE id = ANY (v_jobs);
  SELECT array_agg(id) INTO v_ends FROM ci.job WHERE id = ANY (v_jobs) AND interruptions >= 10;
  UPDATE ci.job SET state = 'cancelled', ended_at = ci.clock(), error = 'cancelled while it ran' WHERE id = ANY (v_cancelled);
  UPDATE ci.job SET state = 'failed', failure = 'interrupted', ended_at = ci.clock(),
                    error = 'interrupted 10 times without an end, the last time because ' || p_message
  WHERE id = ANY (v_ends) AND state = 'open';
  INSERT INTO ci.blocked (job_id) SELECT id FROM ci.job WHERE id = ANY (v_jobs) AND state = 'open';
  INSERT INTO ci.event (kind, subject) SELECT CASE state WHEN 'open' THEN 'e' ELSE 'd' END, id
  FROM ci.job WHERE id = ANY (v_jobs);                                                      -- event: interrupted_is_judged
  RETURN QUERY SELECT unnest(v_jobs);
END $$;

-- A failed attempt: ends the job, or sends it back to wait (30 s, 1 min, 2 min …) for up to three retries elsewhere.
CREATE FUNCTION ci.fail_attempts(p_jobs bigint[], p_node int, p_kind ci.failure_kind, p_message text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM ci.end_attempts(p_jobs, p_kind.kind, p_message, true);
  UPDATE ci.job SET failure = p_kind.kind, error = p_message, avoid = p_node,
    retries = retries + CASE WHEN p_kind.permanent THEN 0 ELSE 1 END,
    state = CASE WHEN p_kind.permanent OR retries >= 3 THEN 'failed' ELSE 'open' END::ci.job_state,
    ended_at = CASE WHEN p_kind.permanent OR retries >= 3 THEN ci.clock() END
  WHERE id = ANY (p_jobs);
  -- A node that died was waited for already, for as long as its lease.
  INSERT INTO ci.blocked (job_id, run_at)
  SELECT id, CASE WHEN p_kind.kind <> 'node_died' THEN ci.clock() + interval '15 seconds' * 2 ^ retries END
  FROM ci.job WHERE id = ANY (p_jobs) AND state = 'open';
  -- An input may have been lost, built again and failed while it ran: then there is nothing to wait for.
  INSERT INTO ci.event (kind, subject) SELECT 'e', id FROM ci.job WHERE id = ANY (p_jobs) AND state = 'open';     -- event: retry_is_judged
  INSERT INTO ci.event (kind, subject) SELECT 'd', id FROM ci.job WHERE id = ANY (p_jobs) AND state = 'failed';   -- event: failed_tells_dependents
END $$;

CREATE FUNCTION ci.start_upload(p_session bigint, p_secret text, p_jobs bigint[], p_attempts bigint[]) RETURNS SETOF bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_session(p_session, p_secret), ci.require_few(p_jobs);
  RETURN QUERY UPDATE ci.running r SET phase = 'uploading', uploaded_at = ci.clock()
    WHERE r.job_id = ANY (p_jobs)
      AND r.attempt = ANY (p_attempts)                                                      -- fence: upload_attempt
      AND r.session_id = p_session                                                          -- fence: upload_session
      AND r.phase = 'building'                                                              -- fence: upload_phase
    RETURNING r.job_id;
END $$;

CREATE FUNCTION ci.give_back(p_session bigint, p_secret text, p_jobs bigint[], p_attempts bigint[], p_message text) RETURNS SETOF bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_session(p_session, p_secret), ci.require_few(p_jobs);
  RETURN QUERY SELECT ci.interrupt(p_session, p_jobs, p_attempts, left(p_message, 2000));
END $$;

-- False: the claim was not its own any more.
CREATE FUNCTION ci.fail(p_session bigint, p_secret text, p_job bigint, p_attempt bigint, p_kind text, p_message text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_session ci.session := ci.require_session(p_session, p_secret); v_kind ci.failure_kind; v_running ci.running;
BEGIN
  SELECT * INTO v_kind FROM ci.failure_kind k WHERE k.kind = p_kind AND k.kind NOT IN ('unsupported', 'node_died', 'interrupted', 'source_lost', 'not_published');
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC002', format('%L is not a kind of failure that a builder can report', left(p_kind, 100)));
  END IF;
  -- As whoever ends a session: its row first.
  IF v_kind.blames_node THEN PERFORM FROM ci.session WHERE id = p_session FOR NO KEY UPDATE; END IF;    -- lock: fail_session
  SELECT * INTO v_running FROM ci.own_attempts(p_session, ARRAY[p_job], ARRAY[p_attempt]) WHERE phase <> 'accepted';   -- fence: accepted_cannot_fail
  IF NOT FOUND THEN RETURN false; END IF;
  IF v_running.cancelled AND NOT ci.wanted(p_job, v_running.refused) THEN
    PERFORM ci.interrupt(p_session, ARRAY[p_job], ARRAY[p_attempt], left(p_message, 2000));
    RETURN true;
  END IF;
  PERFORM ci.fail_attempts(ARRAY[p_job], v_session.node_id, v_kind,
    left(p_message, 2000) || CASE WHEN p_kind = 'oom' THEN ci.size_advice(p_job, v_session) ELSE '' END);
  IF v_kind.blames_node THEN
    UPDATE ci.session SET streak = streak + 1 WHERE id = p_session;
  END IF;
  RETURN true;
END $$;

-- An input cannot be had from the cache. The job waits, at no cost to it, for a signer to look (ci.settle_missing).
CREATE FUNCTION ci.input_missing(p_session bigint, p_secret text, p_job bigint, p_attempt bigint, p_path text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_running ci.running;
BEGIN
  PERFORM ci.require_session(p_session, p_secret);
  SELECT * INTO v_running FROM ci.own_attempts(p_session, ARRAY[p_job], ARRAY[p_attempt]) WHERE phase = 'building';   -- fence: missing_phase
  IF NOT FOUND THEN RETURN false; END IF;
  IF v_running.cancelled AND NOT ci.wanted(p_job, v_running.refused) THEN
    PERFORM ci.interrupt(p_session, ARRAY[p_job], ARRAY[p_attempt], 'an input is missing');
    RETURN true;
  END IF;
  -- A whole store path, so that any word of the derivation's text is not one.
  IF NOT coalesce(p_path ~ '^/[^ ]*/[0-9a-z]{32}-[^/ ]{1,211}$', false) OR NOT EXISTS (SELECT FROM ci.job_input i JOIN ci.output o ON o.job_id = i.input
                 CROSS JOIN LATERAL ci.reachable(ARRAY[o.path]) c WHERE i.referrer = p_job AND c.path = p_path)
     AND NOT EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = p_job AND position(convert_to(p_path, 'UTF8') IN a.text) > 0) THEN
    PERFORM ci.refuse('HC002', format('%s is no input of job %s', left(p_path, 300), p_job));
  END IF;
  PERFORM ci.end_attempts(ARRAY[p_job], 'input_missing', p_path, false);
  INSERT INTO ci.missing (path, job_id) VALUES (p_path, p_job);
  INSERT INTO ci.blocked (job_id) VALUES (p_job);
  INSERT INTO ci.event (kind, subject) VALUES ('e', p_job);                                 -- event: missing_is_judged
  RETURN true;
END $$;

-- What was added to logs, at byte offsets. Bytes before the offset that are there already are not taken twice.
CREATE FUNCTION ci.log_append(p_session bigint, p_secret text, p_jobs bigint[], p_attempts bigint[], p_offsets bigint[], p_data bytea[]) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_count int;
BEGIN
  IF EXISTS (SELECT FROM unnest(p_offsets, p_data) u (o, d) WHERE octet_length(d) > 65536 OR o < 0 OR o > 1099511627776)
     OR cardinality(p_jobs) > 1024 THEN
    PERFORM ci.refuse('HC002', 'a log append holds at most 1024 jobs of 65536 bytes each, at offsets of 0 to 1 TiB');
  END IF;
  INSERT INTO ci.log_tail AS t (job_id, slot, attempt, starts, data)
  SELECT r.job_id, w % 32, r.attempt, greatest(u.starts, w * 2048),
         substr(u.data, (greatest(u.starts, w * 2048) - u.starts + 1)::int, ((w + 1) * 2048 - greatest(u.starts, w * 2048))::int)
  FROM ci.own_session(p_session, p_secret) s
  CROSS JOIN unnest(p_jobs, p_attempts, p_offsets, p_data) u (job_id, attempt, starts, data)
  JOIN ci.running r ON r.job_id = u.job_id
   AND r.attempt = u.attempt                                                                -- fence: log_attempt
   AND r.session_id = s.id                                                                  -- fence: log_session
  CROSS JOIN LATERAL generate_series(greatest(u.starts / 2048, (u.starts + octet_length(u.data) - 1) / 2048 - 31), (u.starts + octet_length(u.data) - 1) / 2048) w
  ORDER BY r.job_id
  ON CONFLICT (job_id, slot) DO UPDATE SET attempt = EXCLUDED.attempt,
    starts = CASE WHEN t.attempt = EXCLUDED.attempt AND EXCLUDED.starts BETWEEN t.starts AND t.starts + octet_length(t.data) THEN t.starts ELSE EXCLUDED.starts END,
    data = CASE WHEN t.attempt = EXCLUDED.attempt AND EXCLUDED.starts BETWEEN t.starts AND t.starts + octet_length(t.data)
      THEN t.data || substr(EXCLUDED.data, (t.starts + octet_length(t.data) - EXCLUDED.starts + 1)::int) ELSE EXCLUDED.data END
  WHERE t.attempt <> EXCLUDED.attempt OR t.starts + octet_length(t.data) < EXCLUDED.starts + octet_length(EXCLUDED.data);   -- fence: log_offset
  GET DIAGNOSTICS v_count = ROW_COUNT;
  RETURN v_count;
END $$;

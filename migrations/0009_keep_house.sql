-- The control plane's own house: replicas, the two leaders, and what the janitor's leader does. Safety never rests on
-- leadership: every function here is right if two run at once; the generation only keeps a former leader from judging.

------------------------------------------------------------------------------------------------ replicas, leaders

-- May this login speak for a replica of that role? Builders show their secrets to whoever is registered as a signer. `up` does
-- an operator's work, and the owner's logins may do everything.
CREATE FUNCTION ci.acts_as(p_role text) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM pg_roles g WHERE pg_has_role(session_user, g.oid, 'MEMBER')
                 AND g.rolname IN ('harmonia_owner', 'harmonia_' || CASE p_role WHEN 'up' THEN 'operator' ELSE p_role END))
$$;

-- Registers a replica or says that it lives; created_at stays, so the oldest stays the oldest across a restart.
CREATE FUNCTION ci.beat(p_replica uuid, p_role text, p_url text) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO ci.replica AS r (id, role, url)
  SELECT p_replica, p_role, p_url
  WHERE ci.acts_as(p_role)                                                                  -- fence: beat_role
  ON CONFLICT (id) DO UPDATE SET last_beat = ci.clock(), url = EXCLUDED.url, role = EXCLUDED.role
  WHERE ci.acts_as(r.role);                                                                 -- fence: beat_replica
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC004', format('login %s may not speak for replica %s as %L: it is in none of the groups that may',
      session_user, p_replica, left(p_role, 100)));
  END IF;
END $$;

CREATE FUNCTION ci.leave(p_replica uuid) RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  DELETE FROM ci.replica WHERE id = p_replica
    AND ci.acts_as(role);                                                                   -- fence: leave_replica
$$;

-- Replicas that beat within the last 30 s, the oldest first.
CREATE FUNCTION ci.healthy_replicas() RETURNS SETOF ci.replica LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
  AS $$ SELECT * FROM ci.replica WHERE last_beat > ci.clock() - interval '30 seconds' ORDER BY created_at, id $$;

CREATE FUNCTION ci.lock_key(p_name text) RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
  AS $$ SELECT lock_key FROM ci.leadership WHERE name = p_name $$;

-- Whether the lock is held, by p_pid if it is given.
CREATE FUNCTION ci.is_held(p_key bigint, p_pid int DEFAULT NULL) RETURNS bool LANGUAGE sql VOLATILE AS $$
  SELECT EXISTS (SELECT FROM pg_locks k WHERE k.locktype = 'advisory' AND k.granted AND k.pid = coalesce(p_pid, k.pid)
    AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (k.classid::bigint << 32 | k.objid::bigint) = p_key AND k.objsubid = 1)
$$;

-- To be called on the connection that has just taken the advisory lock: a new generation begins.
CREATE FUNCTION ci.lead(p_name text, p_replica uuid) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_generation bigint;
BEGIN
  UPDATE ci.leadership l SET generation = generation + 1, replica_id = p_replica, pid = pg_backend_pid(), since = ci.clock(), looked_at = ci.clock()
  WHERE l.name = p_name
    AND ci.is_held(l.lock_key, pg_backend_pid())                        -- fence: lead_lock
  RETURNING generation INTO v_generation;
  IF NOT FOUND THEN PERFORM ci.refuse('HC005', format('this connection does not hold the lock of the %s', left(p_name, 100))); END IF;
  RETURN v_generation;
END $$;

-- Who leads, as far as can be told from here: the last to have begun a generation, and whether the lock is held at all.
CREATE FUNCTION ci.leader(p_name text) RETURNS TABLE (replica_id uuid, url text, generation bigint, since timestamptz, held bool)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT l.replica_id, r.url, l.generation, l.since, ci.is_held(l.lock_key)
  FROM ci.leadership l LEFT JOIN ci.replica r ON r.id = l.replica_id WHERE l.name = p_name
$$;

-- Since when this generation leads. Its connection must be unbroken: who lost it may not have noticed yet, and would
-- judge after an outage as if there had been none.
CREATE FUNCTION ci.require_leader(p_name text, p_generation bigint) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $$
DECLARE v_since timestamptz;
BEGIN
  SELECT since INTO v_since FROM ci.leadership l
  WHERE name = p_name
    AND generation = p_generation                                         -- fence: generation
    AND ci.is_held(l.lock_key, l.pid);                                                      -- fence: unbroken
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC005', format('generation %s of the %s is over: another leads', p_generation, p_name));
  END IF;
  RETURN v_since;
END $$;

------------------------------------------------------------------------------------------------ the janitor's work

-- Builds whose lease ended. Judges nothing until it has led for a whole lease on one connection: after an outage of
-- the database every builder has had the time to say that it lives. Likewise if it has not looked for a while: a machine
-- that slept, or whose clock was set, had no heartbeats either. A session that lives but does not name a build never got
-- it: that is an interruption, not a failure.
CREATE FUNCTION ci.reap(p_generation bigint) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_now timestamptz := ci.clock(); v_since timestamptz := ci.require_leader('janitor', p_generation); v_row record; v_count int := 0; v_kind ci.failure_kind;
BEGIN
  IF (SELECT looked_at FROM ci.leadership WHERE name = 'janitor') < v_now - interval '30 seconds' THEN v_since := v_now; END IF;   -- fence: reap_slept
  UPDATE ci.leadership SET looked_at = v_now, since = v_since WHERE name = 'janitor';
  IF v_since > v_now - ci.lease() THEN RETURN 0; END IF;                                    -- fence: reap_waits
  SELECT * INTO v_kind FROM ci.failure_kind WHERE kind = 'node_died';
  FOR v_row IN
    SELECT r.job_id, r.attempt, r.session_id, r.cancelled AND NOT ci.wanted(r.job_id, r.refused) AS cancelled, s.node_id, n.name, s.ended_at IS NULL AND s.last_seen > v_now - ci.lease() AS alive
    FROM ci.running r JOIN ci.session s ON s.id = r.session_id JOIN ci.node n ON n.id = s.node_id
    WHERE r.lease_until < v_now
      AND r.phase <> 'accepted'                                                             -- fence: reap_accepted
    ORDER BY r.job_id LIMIT 1000 FOR UPDATE OF r SKIP LOCKED                                -- lock: reap_running
  LOOP
    IF v_row.alive OR v_row.cancelled THEN
      PERFORM ci.interrupt(v_row.session_id, ARRAY[v_row.job_id], ARRAY[v_row.attempt], format('node %s did not know of it', v_row.name));
    ELSE
      PERFORM ci.fail_attempts(ARRAY[v_row.job_id], v_row.node_id, v_kind, format('node %s was not heard of for 2 minutes', v_row.name));
    END IF;
    v_count := v_count + 1;
  END LOOP;
  WITH dead AS (UPDATE ci.session SET ended_at = v_now WHERE id = ANY (ARRAY(
         SELECT s.id FROM ci.session s WHERE s.ended_at IS NULL AND s.last_seen < v_now - ci.lease()
           AND NOT EXISTS (SELECT FROM ci.running r WHERE r.session_id = s.id AND r.phase <> 'accepted') FOR UPDATE SKIP LOCKED)) RETURNING id)    -- lock: reap_session_skips
  DELETE FROM ci.drain d USING dead WHERE d.session_id = dead.id;
  RETURN v_count;
END $$;

-- Notes which classes somebody could run, pools without a single node included, and reopens what had failed for want
-- of one. Runs under the resolver's lock.
CREATE FUNCTION ci.see_capable() RETURNS void LANGUAGE plpgsql AS $$
DECLARE v_classes int[]; v_jobs bigint[];
BEGIN
  SELECT array_agg(c.id) INTO v_classes FROM ci.class c
  WHERE EXISTS (SELECT FROM ci.pool p WHERE p.deleted_at IS NULL
                AND ci.fits(p, c))
     OR EXISTS (SELECT FROM ci.session s JOIN ci.profile p ON p.id = s.profile_id
                WHERE s.ended_at IS NULL AND s.last_seen > ci.clock() - ci.lease() AND c.id = ANY (p.classes));
  UPDATE ci.class SET last_capable = ci.clock() WHERE id = ANY (v_classes);
  SELECT array_agg(id) INTO v_jobs FROM (
    SELECT j.id FROM ci.job j WHERE j.failure = 'unsupported' AND j.state = 'failed' AND j.class_id = ANY (v_classes)
      AND ci.wanted(j.id) ORDER BY j.id LIMIT 10000 FOR NO KEY UPDATE) x;                   -- lock: capable_reopens
  IF v_jobs IS NOT NULL THEN PERFORM ci.reopen(v_jobs); END IF;
END $$;

-- Fails what nobody could run for 30 minutes: counted from when somebody last could, never from the job's age.
CREATE FUNCTION ci.fail_unsupported(p_generation bigint) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_count int := 0; c ci.class;
BEGIN
  PERFORM ci.require_leader('janitor', p_generation);
  PERFORM FROM ci.resolver FOR UPDATE;                                                      -- lock: unsupported_resolver
  PERFORM ci.see_capable();
  FOR c IN SELECT * FROM ci.class WHERE last_capable < ci.clock() - interval '30 minutes' LOOP
    v_count := v_count + (SELECT count(*) FROM ci.retire(ARRAY(
      SELECT DISTINCT o.job_id FROM ci.lane l JOIN ci.offer o ON o.lane_id = l.id WHERE l.class_id = c.id LIMIT 2000),
      'failed', 'unsupported', ci.what_is_missing(c)));
  END LOOP;
  RETURN v_count;
END $$;

-- Half-life of about 13 hours: 0.95 for every full hour since the last time.
CREATE FUNCTION ci.decay(p_generation bigint) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_hours int;
BEGIN
  PERFORM ci.require_leader('janitor', p_generation);
  SELECT floor(extract(epoch FROM ci.clock() - decayed_at) / 3600) INTO v_hours FROM ci.resolver FOR UPDATE;    -- lock: decay_once
  IF v_hours <= 0 THEN RETURN 0; END IF;
  UPDATE ci.lane SET used = used * 0.95 ^ least(v_hours, 1000) WHERE used > 0;
  UPDATE ci.resolver SET decayed_at = decayed_at + make_interval(hours => v_hours);
  PERFORM ci.rank();
  RETURN v_hours;
END $$;

-- What has had its day: replicas silent for a minute, tails of builds that ended, long-gone sessions without history, and kinds of
-- nodes and nodes without a session. A node whose builds are still known has sessions. One of which only results are left is kept,
-- for `forget --built-by`; those are looked through once a day.
CREATE FUNCTION ci.prune(p_generation bigint) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_useless int[];
BEGIN
  PERFORM ci.require_leader('janitor', p_generation);
  DELETE FROM ci.session s WHERE s.ended_at < ci.clock() - interval '1 day'
    AND NOT EXISTS (SELECT FROM ci.running r WHERE r.session_id = s.id) AND NOT EXISTS (SELECT FROM ci.attempt a WHERE a.session_id = s.id);
  -- Before anything is locked that somebody may need: every record is looked at.
  IF (SELECT coalesce(pruned_at, '-infinity') FROM ci.leadership WHERE name = 'janitor') < ci.clock() - interval '1 day' THEN
    v_useless := ARRAY(
      SELECT n.id FROM ci.node n
      WHERE NOT EXISTS (SELECT FROM ci.session s WHERE s.node_id = n.id) AND NOT EXISTS (SELECT FROM ci.drain d WHERE d.node_id = n.id)
        AND NOT EXISTS (SELECT FROM ci.finding f WHERE f.node_id = n.id)
        AND NOT EXISTS (SELECT FROM ci.canonical c WHERE c.node_id = n.id));                -- fence: prune_built
  END IF;
  DELETE FROM ci.replica WHERE last_beat < ci.clock() - interval '60 seconds';
  -- A row that a builder keeps locked is not waited for: it is the janitor who would have to end that transaction.
  DELETE FROM ci.log_tail WHERE ctid = ANY (ARRAY(
    SELECT t.ctid FROM ci.log_tail t WHERE NOT EXISTS (SELECT FROM ci.running r WHERE r.job_id = t.job_id AND r.attempt = t.attempt)
    FOR UPDATE SKIP LOCKED));                                                               -- lock: prune_skips
  -- What registers at this moment is in use.
  DELETE FROM ci.profile WHERE id = ANY (ARRAY(
    SELECT p.id FROM ci.profile p WHERE NOT EXISTS (SELECT FROM ci.session s WHERE s.profile_id = p.id)
    FOR UPDATE SKIP LOCKED));                                                               -- lock: prune_skips_profile
  IF v_useless IS NOT NULL THEN
    DELETE FROM ci.node WHERE id = ANY (ARRAY(
      SELECT n.id FROM ci.node n WHERE n.id = ANY (v_useless) AND NOT EXISTS (SELECT FROM ci.session s WHERE s.node_id = n.id)
      FOR UPDATE SKIP LOCKED));                                                             -- lock: prune_skips_node
    UPDATE ci.leadership SET pruned_at = ci.clock() WHERE name = 'janitor';
  END IF;
END $$;

-- May retention take the want of an evaluation that has ended? What is open still stands for it, unless another wants that too.
CREATE FUNCTION ci.may_unwant(j ci.job) RETURNS bool LANGUAGE sql STABLE AS $$ SELECT j.state <> 'open' OR ci.wanted(j.id) $$;

-- Evaluations past their project's retention that may go (ci.may_go), and the jobs that only they needed. At most p_rows rows a
-- call; answers how many went, 0: for now there is nothing left to do.
CREATE FUNCTION ci.retain(p_generation bigint, p_rows int DEFAULT 2000) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_evaluation ci.evaluation; v_count int := 0; v_jobs bigint[]; v_looked bigint[];
BEGIN
  PERFORM ci.require_leader('janitor', p_generation);
  -- Before anybody has to wait: there may be many to look at. Nobody else removes one.
  SELECT e.* INTO v_evaluation FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
  WHERE e.created_at < ci.clock() - least(p.retention, e.retention) AND ci.may_go(e)
    -- One that waits for builds to end keeps nobody behind it.
    AND (e.state NOT IN ('aborted', 'cancelled') OR NOT EXISTS (SELECT FROM ci.want w WHERE w.evaluation_id = e.id)
         OR EXISTS (SELECT FROM ci.want w JOIN ci.job j ON j.id = w.job_id WHERE w.evaluation_id = e.id AND ci.may_unwant(j)))
  ORDER BY e.id LIMIT 1;
  PERFORM FROM ci.resolver FOR UPDATE;                                                      -- lock: retain_resolver
  PERFORM FROM ci.gate FOR UPDATE;                                                          -- lock: retain_gate
  IF v_evaluation.id IS NOT NULL THEN
    -- Somebody may have pinned it meanwhile, or pushed it again.
    SELECT e.* INTO v_evaluation FROM ci.evaluation e WHERE e.id = v_evaluation.id
      AND ci.may_go(e)                                                                      -- fence: retain_looks_again
    FOR UPDATE;                                                                             -- lock: retain_evaluation
    IF NOT FOUND THEN RETURN 1; END IF;
    IF v_evaluation.state NOT IN ('aborted', 'cancelled') THEN
      PERFORM ci.supersede(v_evaluation.id, v_evaluation.id, 'past its retention');
    END IF;
    WITH gone AS (DELETE FROM ci.want WHERE ctid = ANY (ARRAY(
           SELECT w.ctid FROM ci.want w JOIN ci.job j ON j.id = w.job_id WHERE w.evaluation_id = v_evaluation.id
             AND ci.may_unwant(j) LIMIT p_rows)) RETURNING job_id),
         -- Evaluations that go one after the other share most of their jobs: many are there already.
         left_over AS (INSERT INTO ci.orphan SELECT DISTINCT job_id FROM gone ON CONFLICT DO NOTHING)
    SELECT count(*) INTO v_count FROM gone;
    IF v_count < p_rows AND NOT EXISTS (SELECT FROM ci.want WHERE evaluation_id = v_evaluation.id) THEN
      -- What refers to it goes with it, and its attributes may be as many as its jobs: some at a time, too.
      DELETE FROM ci.evaluation_attr WHERE ctid = ANY (ARRAY(
        SELECT a.ctid FROM ci.evaluation_attr a WHERE a.evaluation_id = v_evaluation.id LIMIT p_rows - v_count));
      IF NOT EXISTS (SELECT FROM ci.evaluation_attr WHERE evaluation_id = v_evaluation.id) THEN
        DELETE FROM ci.evaluation WHERE id = v_evaluation.id;
      END IF;
    END IF;
    RETURN greatest(v_count, 1);
  END IF;

  SELECT array_agg(job_id) INTO v_looked FROM (SELECT job_id FROM ci.orphan LIMIT p_rows) x;
  IF v_looked IS NULL THEN RETURN 0; END IF;
  DELETE FROM ci.orphan WHERE job_id = ANY (v_looked);
  SELECT array_agg(j.id) INTO v_jobs FROM ci.job j WHERE j.id = ANY (v_looked) AND j.state <> 'open'
    AND NOT EXISTS (SELECT FROM ci.want w WHERE w.job_id = j.id)                            -- fence: retain_wanted
    AND NOT EXISTS (SELECT FROM ci.job_input i WHERE i.input = j.id);                       -- fence: retain_input
  WITH edges AS (DELETE FROM ci.job_input WHERE referrer = ANY (v_jobs) RETURNING input)
  INSERT INTO ci.orphan SELECT DISTINCT input FROM edges ON CONFLICT DO NOTHING;
  DELETE FROM ci.aterm WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.proof WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.output WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.twin WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.attempt WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.job_source WHERE job_id = ANY (v_jobs);
  DELETE FROM ci.job WHERE id = ANY (v_jobs);
  RETURN cardinality(v_looked);
END $$;

-- Builders' transactions last milliseconds, evaluators' some seconds. One that stays open holds back vacuum for everybody, and
-- an evaluator's the resolver at the gate: it is ended.
CREATE FUNCTION ci.end_long_transactions(p_generation bigint, p_older_than interval DEFAULT '10 seconds') RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('janitor', p_generation);
  RETURN (SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid)) FROM pg_stat_activity a
    JOIN pg_roles r ON r.oid = a.usesysid AND NOT r.rolsuper
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - p_older_than
      AND (a.usename IN (SELECT login FROM ci.pool)
           OR a.xact_start < clock_timestamp() - 6 * p_older_than AND pg_has_role(r.oid, 'harmonia_evaluator', 'USAGE')));
END $$;

-- The claim: one short call for the builder, a handful of index probes here.

-- Free permits of a limited project, up to p_n, locked.
CREATE FUNCTION ci.permits(p_project int, p_limit int, p_n int) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE v_beyond int; v_free int[];
BEGIN
  -- Builds beyond the limit were there before it: as many free permits are left alone.
  v_beyond := (SELECT count(*) FROM ci.permit m WHERE m.project_id = p_project AND m.n > p_limit AND m.job_id IS NOT NULL);   -- fence: permit_beyond
  SELECT array_agg(n) INTO v_free FROM (
    SELECT m.n FROM ci.permit m WHERE m.project_id = p_project
      AND m.job_id IS NULL                                                                  -- fence: permit_free
      AND m.n <= p_limit                                                                    -- fence: permit_limit
    ORDER BY m.n LIMIT p_n + v_beyond FOR UPDATE SKIP LOCKED) x;                            -- lock: permit
  RETURN coalesce(v_free[v_beyond + 1:], '{}');
END $$;

-- Gives jobs of a limited project permits, which ci.permits has locked for them.
CREATE FUNCTION ci.permit(p_project int, p_limit int, p_jobs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.permit m SET job_id = u.job_id FROM unnest(ci.permits(p_project, p_limit, cardinality(p_jobs)), p_jobs) u (n, job_id)
  WHERE m.project_id = p_project AND m.n = u.n;
END $$;

-- The best job of some of a project's lanes, one a class.
CREATE FUNCTION ci.take_one(p_lanes int[], p_manual bool, p_node int, OUT job_id bigint, OUT lane_id int, OUT estimate real) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE v_lanes int[] := p_lanes;
BEGIN
  WHILE job_id IS NULL AND cardinality(v_lanes) > 0 LOOP
    SELECT l INTO lane_id FROM unnest(v_lanes) l CROSS JOIN LATERAL (
      SELECT o.urgency, o.evaluation_id, o.shortness, o.job_id FROM ci.offer o WHERE o.lane_id = l
      ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id LIMIT 1) h
    ORDER BY h.urgency, h.evaluation_id, h.shortness, h.job_id LIMIT 1;
    EXIT WHEN NOT FOUND;
    DELETE FROM ci.ready r WHERE r.ctid = (
      SELECT r.ctid FROM ci.offer o JOIN ci.ready r ON r.job_id = o.job_id
      WHERE o.lane_id = take_one.lane_id AND (NOT p_manual OR o.urgency < 0)
        AND (r.avoid IS NULL OR r.avoid <> p_node)                                          -- fence: avoid_in_lane
      ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id LIMIT 1
      FOR UPDATE OF r SKIP LOCKED)                                                          -- lock: claim_ready_in_lane
    RETURNING r.job_id, r.estimate INTO job_id, estimate;
    v_lanes := array_remove(v_lanes, lane_id);
  END LOOP;
  DELETE FROM ci.offer o WHERE o.job_id = take_one.job_id;
END $$;

-- Takes up to p_quotas[k] jobs of turn p_turns[k], best first, out of `ready` and `offer`. `spent`: turns that had less.
-- Where this type of node serves all lanes of a project, its best offers are the first of one index; else each lane is asked.
CREATE FUNCTION ci.take(p_turns int[], p_quotas int[], p ci.profile, p_manual bool, p_node int,
    OUT jobs bigint[], OUT turns int[], OUT lanes int[], OUT estimates real[], OUT spent int[]) LANGUAGE plpgsql AS $$
DECLARE i int; n int; v_quotas int[] := p_quotas; v_one record; v_some record;
BEGIN
  spent := '{}';
  FOR k IN 1 .. cardinality(p_turns) LOOP
    i := p_turns[k];
    IF p.limits[i] IS NOT NULL THEN v_quotas[k] := cardinality(ci.permits(p.projects[i], p.limits[i], p_quotas[k])); END IF;
    CONTINUE WHEN p.whole[i];
    FOR m IN 1 .. v_quotas[k] LOOP
      v_one := ci.take_one(p.lanes[p.firsts[i] : p.firsts[i + 1] - 1], p_manual, p_node);
      EXIT WHEN v_one.job_id IS NULL;
      jobs := jobs || v_one.job_id;
      turns := turns || i;
      lanes := lanes || v_one.lane_id;
      estimates := estimates || v_one.estimate;
    END LOOP;
    v_quotas[k] := 0;
  END LOOP;
  WITH picked AS MATERIALIZED (
         SELECT t.turn, r.* FROM unnest(p_turns, v_quotas) t (turn, quota) CROSS JOIN LATERAL (
           SELECT o.lane_id, r.ctid AS place FROM ci.offer o JOIN ci.ready r ON r.job_id = o.job_id
           WHERE o.project_id = p.projects[t.turn] AND (NOT p_manual OR o.urgency < 0)
             AND o.lane_id = ANY (p.lanes)     -- a lane may be newer than the profile          -- fence: claim_lane
             AND (r.avoid IS NULL OR r.avoid <> p_node)                                     -- fence: avoid
           ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id LIMIT t.quota
           FOR UPDATE OF r SKIP LOCKED) r),                                                 -- lock: claim_ready
       gone AS (DELETE FROM ci.ready r USING picked k WHERE r.ctid = k.place RETURNING r.job_id, k.turn, k.lane_id, r.estimate)
  SELECT array_agg(g.job_id) AS jobs, array_agg(g.turn) AS turns, array_agg(g.lane_id) AS lanes, array_agg(g.estimate) AS estimates
  INTO v_some FROM gone g;
  DELETE FROM ci.offer o WHERE o.job_id = ANY (v_some.jobs);
  jobs := jobs || v_some.jobs;
  turns := turns || v_some.turns;
  lanes := lanes || v_some.lanes;
  estimates := estimates || v_some.estimates;
  FOR k IN 1 .. cardinality(p_turns) LOOP
    i := p_turns[k];
    n := coalesce(cardinality(array_positions(turns, i)), 0);
    IF n < p_quotas[k] THEN spent := spent || i; END IF;
    IF n > 0 AND p.limits[i] IS NOT NULL THEN
      PERFORM ci.permit(p.projects[i], p.limits[i], ARRAY(SELECT u.job FROM unnest(jobs, turns) u (job, turn) WHERE u.turn = i));
    END IF;
  END LOOP;
END $$;

-- Takes up to p_want jobs, never more than the session's free slots: manual priority, least used project, older
-- evaluation, longest chain above, id. Answers all that is needed to build them.
CREATE FUNCTION ci.claim(p_session bigint, p_secret text, p_want int)
  RETURNS TABLE (job_id bigint, attempt bigint, drv_path text, aterm bytea, estimate real,
                 input_drvs text[], input_outputs text[], input_paths text[], input_hashes bytea[])
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  v_session record; p ci.profile; v_got record; v_free int; v_left int := p_want; v_drains bool; v_now timestamptz;
  v_order int[]; v_next int; v_turn int; v_turns int[]; v_asked int[]; v_quotas int[];
  v_jobs bigint[]; v_of int[]; v_lanes int[]; v_estimates real[];
BEGIN
  -- One claim of a session at a time: its free slots are counted, and its drains looked for, under this lock.
  SELECT s.node_id, s.slots, s.streak, q AS profile INTO v_session FROM ci.session s JOIN ci.profile q ON q.id = s.profile_id
  WHERE s.id = p_session AND ci.speaks(s, p_secret) AND cardinality(q.projects) > 0
  FOR NO KEY UPDATE OF s;                                                                   -- lock: claim_session
  IF NOT FOUND THEN       -- nothing to claim, the common case of an idle farm: no lock, no write
    PERFORM ci.require_session(p_session, p_secret);
    RETURN;
  END IF;
  p := v_session.profile;
  SELECT CASE WHEN count(*) FILTER (WHERE r.phase = 'uploading') > 2 * v_session.slots THEN 0
              ELSE v_session.slots - count(*) FILTER (WHERE r.phase = 'building') END,
         EXISTS (SELECT FROM ci.drain d WHERE d.node_id = v_session.node_id AND d.session_id IN (0, p_session))
  INTO v_free, v_drains FROM ci.running r WHERE r.session_id = p_session;
  v_left := least(v_left, v_free);                                                          -- fence: free_slots
  IF v_left <= 0
     OR v_drains                                                                            -- fence: claim_draining
     OR v_session.streak >= 3                                                               -- fence: claim_streak
  THEN RETURN; END IF;

  -- Manual jobs first, whoever's they are; then all, in the profile's order or, beyond its manual jobs, by rank.
  FOR v_pass IN CASE WHEN p.tops[1] > 0 THEN 1 ELSE 2 END .. 2 LOOP
    IF v_pass = 1 THEN
      v_order := ARRAY(SELECT i FROM generate_subscripts(p.projects, 1) i WHERE p.tops[i] > 0);
    ELSIF p.tops[1] > 0 THEN
      v_order := ARRAY(SELECT i FROM generate_subscripts(p.projects, 1) i ORDER BY p.ranks[i], i);
    END IF;
    v_turns := '{}';
    v_next := 1;
    WHILE v_left > 0 LOOP
      -- No more projects are asked than jobs are wanted.
      WHILE cardinality(v_turns) < v_left AND v_next <= cardinality(coalesce(v_order, p.projects)) LOOP
        v_turns := v_turns || coalesce(v_order[v_next], v_next);
        v_next := v_next + 1;
      END LOOP;
      EXIT WHEN cardinality(v_turns) = 0;
      IF v_left = 1 THEN
        v_asked := v_turns[1:1];
        v_quotas := '{1}';
      ELSE        -- a batch is spread as if picked one by one, each pick moving its project back by a minute per share
        SELECT array_agg(i ORDER BY first), array_agg(n ORDER BY first) INTO v_asked, v_quotas FROM (
          SELECT i, count(*)::int AS n, min(place) AS first FROM (
            SELECT i, place FROM unnest(v_turns) WITH ORDINALITY t (i, place), generate_series(0, v_left - 1) k
            ORDER BY p.ranks[i] + k * 60 * p.weights[i], place LIMIT v_left) x GROUP BY i) y;
      END IF;
      v_got := ci.take(v_asked, v_quotas, p, v_pass = 1, v_session.node_id);
      -- Who has less than its part, or may have no more, leaves the rest to the others.
      FOREACH v_turn IN ARRAY v_got.spent LOOP v_turns := array_remove(v_turns, v_turn); END LOOP;
      v_jobs := v_jobs || v_got.jobs;
      v_of := v_of || v_got.turns;
      v_lanes := v_lanes || v_got.lanes;
      v_estimates := v_estimates || v_got.estimates;
      v_left := v_left - coalesce(cardinality(v_got.jobs), 0);
    END LOOP;
  END LOOP;
  IF v_jobs IS NULL THEN RETURN; END IF;

  -- Not before the locks were waited for: a claim is later than the ends that made its jobs ready.
  v_now := ci.clock();
  RETURN QUERY
    WITH begun AS (
      INSERT INTO ci.running (job_id, attempt, session_id, node_id, lane_id, permit, estimate, claimed_at, lease_until)
      SELECT u.job_id, nextval('ci.attempt_number'), p_session, v_session.node_id, u.lane_id, p.limits[u.turn] IS NOT NULL, u.estimate, v_now, v_now + ci.lease()
      FROM unnest(v_jobs, v_lanes, v_of, v_estimates) u (job_id, lane_id, turn, estimate)
      RETURNING job_id, attempt, estimate)
    SELECT r.job_id, r.attempt, j.drv_path, a.text, r.estimate, i.drvs, i.names, i.paths, i.hashes
    FROM begun r JOIN ci.job j ON j.id = r.job_id LEFT JOIN ci.aterm a ON a.job_id = r.job_id
    CROSS JOIN LATERAL (
      SELECT array_agg(d.drv_path) AS drvs, array_agg(o.name) AS names, array_agg(o.path) AS paths, array_agg(c.nar_hash) AS hashes
      FROM ci.job_input e JOIN ci.job d ON d.id = e.input JOIN ci.output o ON o.job_id = e.input LEFT JOIN ci.canonical c ON c.path = o.path
      WHERE e.referrer = r.job_id) i;
END $$;

-- Everything reachable from these paths, with what it must be, as far as that is known.
CREATE FUNCTION ci.reachable(p_paths text[]) RETURNS TABLE (path text, nar_hash bytea) LANGUAGE sql STABLE AS $$
  WITH RECURSIVE reach (path) AS (
    SELECT unnest(p_paths)
    UNION SELECT unnest(c.refs) FROM reach r JOIN ci.canonical c ON c.path = r.path)
  SELECT r.path, c.nar_hash FROM reach r LEFT JOIN ci.canonical c ON c.path = r.path
$$;

-- The run-time closure of a claim's inputs, for a builder that has not checked them before. Not part of the claim: most
-- builds share most of their closure, which would be walked, and sent, again and again.
CREATE FUNCTION ci.closure(p_session bigint, p_secret text, p_paths text[]) RETURNS TABLE (path text, nar_hash bytea)
  LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_session(p_session, p_secret);
  IF cardinality(p_paths) > 4096 THEN PERFORM ci.refuse('HC002', 'the closure of at most 4096 paths at a time'); END IF;
  RETURN QUERY SELECT * FROM ci.reachable(p_paths);
END $$;

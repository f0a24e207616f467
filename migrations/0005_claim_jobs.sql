-- The claim: one short call for the builder, a handful of index probes here.

-- Up to p_n jobs out of one project's lanes (one lane a class), best first.
CREATE FUNCTION ci.take(p_project int, p_limit int, p_lanes int[], p_manual bool, p_node int, p_n int,
    OUT jobs bigint[], OUT lanes int[], OUT estimates real[]) LANGUAGE plpgsql AS $$
DECLARE v_lanes int[] := p_lanes; v_lane int; v_left int := p_n; v_got bigint[]; v_estimates real[]; v_permits int[]; v_beyond int := 0;
BEGIN
  jobs := '{}'; lanes := '{}'; estimates := '{}';
  IF p_limit IS NOT NULL THEN
    -- Builds beyond the limit were there before it: as many free permits are left alone.
    v_beyond := (SELECT count(*) FROM ci.permit m WHERE m.project_id = p_project AND m.n > p_limit AND m.job_id IS NOT NULL);   -- fence: permit_beyond
    SELECT array_agg(n) INTO v_permits FROM (
      SELECT m.n FROM ci.permit m WHERE m.project_id = p_project
        AND m.job_id IS NULL                                                                -- fence: permit_free
        AND m.n <= p_limit                                                                  -- fence: permit_limit
      ORDER BY m.n LIMIT p_n + v_beyond FOR UPDATE SKIP LOCKED) x;                          -- lock: permit
    v_left := least(p_n, coalesce(cardinality(v_permits), 0) - v_beyond);
  END IF;
  WHILE v_left > 0 AND cardinality(v_lanes) > 0 LOOP
    v_lane := v_lanes[1];
    IF cardinality(v_lanes) > 1 THEN        -- the class whose best offer comes first
      SELECT l INTO v_lane FROM unnest(v_lanes) l CROSS JOIN LATERAL (
        SELECT o.* FROM ci.offer o JOIN ci.ready r ON r.job_id = o.job_id      -- what this batch took is not offered again
        WHERE o.lane_id = l AND (r.avoid IS NULL OR r.avoid <> p_node)
        ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id LIMIT 1) h
      ORDER BY h.urgency, h.evaluation_id, h.shortness, h.job_id LIMIT 1;
      EXIT WHEN NOT FOUND;
    END IF;
    WITH gone AS (
      DELETE FROM ci.ready r WHERE r.ctid = ANY (ARRAY(
        SELECT r.ctid FROM ci.offer o JOIN ci.ready r ON r.job_id = o.job_id
        WHERE o.lane_id = v_lane AND (NOT p_manual OR o.urgency < 0)
          AND (r.avoid IS NULL OR r.avoid <> p_node)                                        -- fence: avoid
        ORDER BY o.urgency, o.evaluation_id, o.shortness, o.job_id
        LIMIT CASE cardinality(v_lanes) WHEN 1 THEN v_left ELSE 1 END
        FOR UPDATE OF r SKIP LOCKED))                                                       -- lock: claim_ready
      RETURNING r.job_id, r.estimate)
    SELECT array_agg(g.job_id), array_agg(g.estimate) INTO v_got, v_estimates FROM gone g;
    IF v_got IS NULL THEN
      v_lanes := array_remove(v_lanes, v_lane);
    ELSE
      jobs := jobs || v_got;
      estimates := estimates || v_estimates;
      lanes := lanes || array_fill(v_lane, ARRAY[cardinality(v_got)]);
      v_left := v_left - cardinality(v_got);
    END IF;
  END LOOP;
  IF p_limit IS NOT NULL THEN
    UPDATE ci.permit m SET job_id = u.job_id FROM unnest(v_permits, jobs) u (n, job_id)
    WHERE m.project_id = p_project AND m.n = u.n AND u.job_id IS NOT NULL;
  END IF;
END $$;

-- Everything reachable from these paths, with what it must be: what a builder checks before it builds. In PL/pgSQL so
-- that it is not inlined: a recursive union allocates its hash table even where it is never run, at 0.5 ms a claim.
CREATE FUNCTION ci.closure(p_paths text[], OUT paths text[], OUT hashes bytea[]) LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
  WITH RECURSIVE reach (path) AS (
    SELECT unnest(p_paths)
    UNION SELECT unnest(c.refs) FROM reach r JOIN ci.canonical c ON c.path = r.path)
  SELECT array_agg(r.path), array_agg(c.nar_hash) INTO paths, hashes FROM reach r LEFT JOIN ci.canonical c ON c.path = r.path;
END $$;

-- Takes up to p_want jobs, never more than the session's free slots: manual priority, least used project, older
-- evaluation, longest chain above, id. Answers all that is needed to build them.
CREATE FUNCTION ci.claim(p_session bigint, p_secret text, p_want int)
  RETURNS TABLE (job_id bigint, attempt bigint, drv_path text, aterm bytea, estimate real,
                 input_drvs text[], input_outputs text[], input_paths text[], closure_paths text[], closure_hashes bytea[])
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
  p ci.profile; v_session ci.session; v_free int; v_left int; v_drains bool; v_now timestamptz := ci.clock(); v_taken record;
  v_turns int[]; v_asked int[]; v_quotas int[];
  v_jobs bigint[] := '{}'; v_lanes int[] := '{}'; v_estimates real[] := '{}'; v_permits bool[] := '{}';
BEGIN
  -- Nothing to claim is the common case of an idle farm: answered without a lock or a write.
  SELECT q.* INTO p FROM ci.own_session(p_session, p_secret) s JOIN ci.profile q ON q.id = s.profile_id;
  IF NOT FOUND THEN PERFORM ci.require_session(p_session, p_secret); END IF;
  IF cardinality(p.projects) = 0 THEN RETURN; END IF;

  -- One claim of a session at a time: its free slots are counted, and its drains looked for, under this lock.
  SELECT * INTO v_session FROM ci.session s WHERE s.id = p_session FOR NO KEY UPDATE;       -- lock: claim_session
  SELECT CASE WHEN count(*) FILTER (WHERE r.phase = 'uploading') > 2 * v_session.slots THEN 0
              ELSE v_session.slots - count(*) FILTER (WHERE r.phase = 'building') END,
         EXISTS (SELECT FROM ci.drain d WHERE d.node_id = v_session.node_id AND d.session_id IN (0, p_session))
  INTO v_free, v_drains FROM ci.running r WHERE r.session_id = p_session;
  v_left := p_want;
  v_left := least(v_left, v_free);                                                          -- fence: free_slots
  IF v_left <= 0
     OR v_drains                                                                            -- fence: claim_draining
     OR v_session.ended_at IS NOT NULL                                                      -- fence: claim_ended
     OR v_session.streak >= 3                                                               -- fence: claim_streak
  THEN RETURN; END IF;

  -- Manual jobs first, whoever's they are; then all. A batch is spread as if picked one by one, each pick moving its
  -- project back by a minute per share; a project that has less than its part leaves the rest to the others.
  FOR v_pass IN CASE WHEN p.tops[1] > 0 THEN 1 ELSE 2 END .. 2 LOOP
    v_turns := ARRAY(SELECT i FROM generate_subscripts(p.projects, 1) i WHERE v_pass = 2 OR p.tops[i] > 0);
    IF v_pass = 2 AND p.tops[1] > 0 THEN    -- beyond its manual jobs a project waits its turn
      v_turns := ARRAY(SELECT i FROM unnest(v_turns) i ORDER BY p.ranks[i], i);
    END IF;
    WHILE v_left > 0 AND cardinality(v_turns) > 0 LOOP
      IF v_left = 1 THEN
        v_asked := v_turns[1:1];
        v_quotas := '{1}';
      ELSE
        SELECT array_agg(i ORDER BY first), array_agg(n ORDER BY first) INTO v_asked, v_quotas FROM (
          SELECT i, count(*)::int AS n, min(place) AS first FROM (
            SELECT i, place FROM unnest(v_turns[1:v_left]) WITH ORDINALITY t (i, place), generate_series(0, v_left - 1) k
            ORDER BY p.ranks[i] + k * 60 * p.weights[i], place LIMIT v_left) x GROUP BY i) y;
      END IF;
      FOR k IN 1 .. cardinality(v_asked) LOOP
        SELECT * INTO v_taken FROM ci.take(p.projects[v_asked[k]], p.limits[v_asked[k]],
            p.lanes[p.firsts[v_asked[k]] : coalesce(p.firsts[v_asked[k] + 1], cardinality(p.lanes) + 1) - 1],
            v_pass = 1, v_session.node_id, v_quotas[k]);
        IF cardinality(v_taken.jobs) < v_quotas[k] THEN v_turns := array_remove(v_turns, v_asked[k]); END IF;
        CONTINUE WHEN cardinality(v_taken.jobs) = 0;
        v_jobs := v_jobs || v_taken.jobs;
        v_lanes := v_lanes || v_taken.lanes;
        v_estimates := v_estimates || v_taken.estimates;
        v_permits := v_permits || array_fill(p.limits[v_asked[k]] IS NOT NULL, ARRAY[cardinality(v_taken.jobs)]);
        v_left := v_left - cardinality(v_taken.jobs);
      END LOOP;
    END LOOP;
  END LOOP;
  IF cardinality(v_jobs) = 0 THEN RETURN; END IF;

  DELETE FROM ci.offer o WHERE o.job_id = ANY (v_jobs);
  INSERT INTO ci.running (job_id, attempt, session_id, lane_id, permit, estimate, claimed_at, lease_until)
  SELECT u.job_id, nextval('ci.attempt_number'), p_session, u.lane_id, u.permit, u.estimate, v_now, v_now + ci.lease()
  FROM unnest(v_jobs, v_lanes, v_permits, v_estimates) u (job_id, lane_id, permit, estimate);
  -- Inputs without references of their own are their own closure, which spares most small builds the walk.
  RETURN QUERY
    SELECT r.job_id, r.attempt, j.drv_path, a.text, r.estimate, i.drvs, i.names, i.paths,
           coalesce(x.paths, i.paths), coalesce(x.hashes, i.hashes)
    FROM unnest(v_jobs) u JOIN ci.running r ON r.job_id = u JOIN ci.job j ON j.id = u LEFT JOIN ci.aterm a ON a.job_id = u
    CROSS JOIN LATERAL (
      SELECT array_agg(d.drv_path) AS drvs, array_agg(o.name) AS names, array_agg(o.path) AS paths,
             array_agg(c.nar_hash) AS hashes, bool_or(c.refs <> '{}') AS deep
      FROM ci.job_input e JOIN ci.job d ON d.id = e.input JOIN ci.output o ON o.job_id = d.id LEFT JOIN ci.canonical c ON c.path = o.path
      WHERE e.referrer = u) i
    LEFT JOIN LATERAL ci.closure(CASE WHEN i.deep THEN i.paths END) x ON true;
END $$;

-- How a derivation graph comes in: known? -> ingest chunk by chunk -> complete (or abort). A chunk is topologically
-- closed (every input is in it or in the database already) and one short transaction, so builds start while a long
-- evaluation still runs, and "no row" never means "cached".
--
-- Two ingests that overlap never deadlock: jobs are inserted in the order of their paths, and existing job rows are
-- written only to reopen them, in the order of their ids.

-- p_queued: for whichever evaluator claims it; else whoever makes it writes it.
CREATE FUNCTION ci.create_evaluation(p_project text, p_source text, p_branch text DEFAULT NULL, p_commit text DEFAULT NULL,
    p_tier smallint DEFAULT 0, p_attrs text[] DEFAULT '{}', p_queued bool DEFAULT false) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_project int; v_id bigint;
BEGIN
  -- Whoever removes the project at this moment ends all that it has: this one, too, or it is not begun.
  SELECT id INTO v_project FROM ci.project WHERE name = p_project AND deleted_at IS NULL FOR SHARE;    -- lock: create_keeps_project
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC007', format('there is no project %s', p_project));
  END IF;
  INSERT INTO ci.evaluation (project_id, source, branch, commit_id, tier, attrs, state)
  VALUES (v_project, p_source, p_branch, p_commit, p_tier, p_attrs, CASE WHEN p_queued THEN 'queued' ELSE 'evaluating' END::ci.evaluation_state)
  RETURNING id INTO v_id;
  RETURN v_id;
END $$;

-- What the evaluator shows to signers so that they take its sources. The last one counts.
CREATE FUNCTION ci.evaluation_token(p_evaluation bigint) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_secret text := ci.new_secret();
BEGIN
  UPDATE ci.evaluation SET secret_hash = ci.secret_hash(v_secret) WHERE id = p_evaluation AND state = 'evaluating';
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC008', format('evaluation %s is not being written', p_evaluation));
  END IF;
  RETURN v_secret;
END $$;

-- Which of these need not be sent: known and not merely as somebody's cached input.
CREATE FUNCTION ci.known(p_drv_paths text[]) RETURNS TABLE (drv_path text, job_id bigint, depth int, height int)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path, j.id, j.depth, j.height FROM unnest(p_drv_paths) u JOIN ci.job j ON j.drv_path = u
  WHERE j.state <> 'cached' OR EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = j.id)
$$;

-- These and all below them, inputs first, if the queue has the texts of all: then nothing of them needs to be read or sent. Not
-- where a source was lost: whoever evaluates again is to look for it.
CREATE FUNCTION ci.known_closure(p_drv_paths text[]) RETURNS TABLE (drv_path text, job_id bigint, depth int, height int)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH RECURSIVE reach (id) AS (
         SELECT j.id FROM unnest(p_drv_paths) u JOIN ci.job j ON j.drv_path = u
         UNION SELECT i.input FROM reach r JOIN ci.job_input i ON i.referrer = r.id),
       below AS MATERIALIZED (
         SELECT j.drv_path, j.id, j.depth, j.height, j.failure, EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = j.id) AS has_text
         FROM reach r JOIN ci.job j ON j.id = r.id)
  SELECT b.drv_path, b.id, b.depth, b.height FROM below b
  WHERE (SELECT bool_and(x.has_text) FROM below x)                                          -- fence: closure_texts
    AND NOT EXISTS (SELECT FROM below x WHERE x.failure = 'source_lost')                    -- fence: closure_sources
  ORDER BY b.depth
$$;

-- What substituters, or uploaded sources, say a path is. The first word stands.
CREATE FUNCTION ci.record_paths(p_paths text[], p_hashes bytea[], p_sizes bigint[], p_refs text[]) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_count int;
BEGIN
  PERFORM ci.keep(p_paths, p_refs);
  INSERT INTO ci.canonical (path, nar_hash, nar_size, refs)
  SELECT p, h, s, string_to_array(r, ' ') FROM unnest(p_paths, p_hashes, p_sizes, p_refs) u (p, h, s, r) ORDER BY p
  ON CONFLICT (path) DO NOTHING;
  GET DIAGNOSTICS v_count = ROW_COUNT;
  -- An open job whose outputs are known now has nothing left to build.
  WITH made AS MATERIALIZED (SELECT DISTINCT o.job_id FROM unnest(p_paths) p JOIN ci.output o ON o.path = p
                JOIN ci.job j ON j.id = o.job_id AND j.state = 'open'),
       twins AS (INSERT INTO ci.twin SELECT job_id FROM made ORDER BY 1 ON CONFLICT DO NOTHING)
  INSERT INTO ci.event (kind, subject) SELECT 'e', job_id FROM made;                        -- event: recorded_path_ends_job
  RETURN v_count;
END $$;

-- Back to work: for jobs whose rows the caller has locked. Who depends on them is looked at again.
CREATE FUNCTION ci.reopen(p_jobs bigint[], p_priority smallint DEFAULT 0) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.job SET state = 'open', retries = 0, interruptions = 0, avoid = NULL, failure = NULL, root = NULL,
                    error = NULL, ended_at = NULL, priority = p_priority
  WHERE id = ANY (p_jobs);
  -- What only a build shows, the next one may show otherwise.
  UPDATE ci.output SET path = NULL, realised = false WHERE job_id = ANY (p_jobs) AND realised;
  INSERT INTO ci.blocked (job_id) SELECT unnest(p_jobs) ON CONFLICT DO NOTHING;
  INSERT INTO ci.event (kind, subject) SELECT 'e', unnest(p_jobs);                          -- event: reopened_is_judged
  INSERT INTO ci.event (kind, subject) SELECT 'o', unnest(p_jobs);                          -- event: reopened_frees_dependents
END $$;

-- Required features in their one order.
CREATE FUNCTION ci.features_of(p_words text) RETURNS text[] LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN RETURN ARRAY(SELECT DISTINCT x FROM unnest(string_to_array(p_words, ' ')) x ORDER BY x); END $$;

-- One chunk. Positions count from 1: first the chunk's derivations, then p_known (ids from ci.known or an earlier
-- chunk), so an edge is a pair of small integers. Answers the ids in the chunk's order.
CREATE FUNCTION ci.ingest(p_evaluation bigint, p_drv_paths text[], p_systems text[], p_features text[], p_cached bool[],
    p_depths int[], p_heights int[], p_aterms bytea[], p_output_of int[], p_output_names text[], p_output_paths text[],
    p_edge_of int[], p_edge_to int[], p_known bigint[]) RETURNS bigint[]
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_evaluation ci.evaluation; v_n int := cardinality(p_drv_paths); v_bad record; v_depths int[];
  v_new bigint[]; v_ids bigint[]; v_fresh bool[]; v_opened bigint[]; v_all bigint[]; v_known record; v_wanted bigint[]; v_classes int[]; v_before bigint;
BEGIN
  IF v_n > 10000 OR cardinality(p_edge_of) > 200000 OR cardinality(p_output_of) > 100000 OR cardinality(p_known) > 100000 THEN
    PERFORM ci.refuse('HC002', 'a chunk holds at most 10000 derivations, 100000 outputs, 100000 known inputs and 200000 edges');
  END IF;
  SELECT min(octet_length(a)), max(octet_length(a)) INTO v_bad FROM unnest(p_aterms) a;
  IF v_bad.max > 4194304 THEN
    PERFORM ci.refuse('HC002', format('a derivation''s text is %s bytes long: at most 4194304 are taken', v_bad.max));
  END IF;
  IF EXISTS (SELECT FROM unnest(p_features) f WHERE octet_length(f) > 1000) THEN
    PERFORM ci.refuse('HC002', 'a derivation asks for features of at most 1000 bytes together');
  END IF;
  IF EXISTS (SELECT FROM unnest(p_depths || p_heights) n WHERE n NOT BETWEEN 0 AND 1000000) THEN
    PERFORM ci.refuse('HC002', 'a derivation has chains of 0 to 1000000 derivations below and above it');
  END IF;
  PERFORM FROM ci.gate FOR KEY SHARE;                                                       -- lock: ingest_gate
  SELECT * INTO v_evaluation FROM ci.evaluation WHERE id = p_evaluation
    AND state = 'evaluating';                                                               -- fence: ingest_state
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC008', format('evaluation %s takes no derivations: it is unknown, complete, aborted or cancelled', p_evaluation));
  END IF;

  -- Everything an edge may point at, and what is known of it; an unknown id leaves a hole.
  SELECT array_agg(coalesce(j.depth, -1) ORDER BY k.n) AS depths, array_agg(j.id) FILTER (WHERE j.state = 'open') AS open,
         array_agg(j.id) FILTER (WHERE j.state = 'cancelled' OR j.state = 'failed') AS ended, array_agg(DISTINCT j.class_id) AS classes
  INTO v_known FROM unnest(p_known) WITH ORDINALITY k (id, n) LEFT JOIN ci.job j ON j.id = k.id;
  IF -1 = ANY (v_known.depths) THEN                                                         -- fence: dangling_id
    PERFORM ci.refuse('HC009', 'an input named by its id is not in the database, or no more: ask which are known again');
  END IF;
  v_depths := coalesce(p_depths, '{}') || coalesce(v_known.depths, '{}');
  SELECT o, i, i BETWEEN 1 AND cardinality(v_depths) AS there INTO v_bad FROM unnest(p_edge_of, p_edge_to) e (o, i)
  WHERE o NOT BETWEEN 1 AND v_n OR i < 1
     OR i > cardinality(v_depths)                                                           -- fence: dangling_edge
     OR v_depths[i] >= v_depths[o]                                                          -- fence: cycle
  LIMIT 1;
  IF FOUND THEN
    PERFORM ci.refuse('HC006', CASE WHEN v_bad.there
      THEN format('%s has an input that is not below it: the graph has a cycle or its depths are wrong', p_drv_paths[v_bad.o])
      ELSE format('%s has an input that is neither in this chunk nor in the database: send inputs first', p_drv_paths[v_bad.o]) END);
  END IF;

  WITH kind AS (SELECT DISTINCT s, f FROM unnest(p_systems, p_features) u (s, f)),
       new AS (INSERT INTO ci.class (system, features) SELECT DISTINCT s, ci.features_of(f) FROM kind ORDER BY 1, 2 ON CONFLICT DO NOTHING RETURNING id)
  INSERT INTO ci.event (kind, subject) SELECT 'p', min(id) FROM new HAVING count(*) > 0;    -- event: class_matches_profiles

  WITH c AS MATERIALIZED (SELECT u.s, u.f, k.id FROM (SELECT DISTINCT s, f FROM unnest(p_systems, p_features) u (s, f)) u
                          JOIN ci.class k ON k.system = u.s AND k.features = ci.features_of(u.f) AND k.memory = 0),
       new AS (INSERT INTO ci.job (drv_path, class_id, depth, height, state, ended_at)
               SELECT u.path, c.id, u.depth, u.height, CASE WHEN u.cached THEN 'cached' ELSE 'open' END::ci.job_state,
                      CASE WHEN u.cached THEN ci.clock() END
               FROM unnest(p_drv_paths, p_systems, p_features, p_cached, p_depths, p_heights) u (path, s, f, cached, depth, height) JOIN c USING (s, f)
               ORDER BY u.path ON CONFLICT (drv_path) DO NOTHING RETURNING id, drv_path, class_id)
  SELECT array_agg(n.id ORDER BY u.n), array_agg(n.id) FILTER (WHERE n.id IS NOT NULL), array_agg(n.id IS NOT NULL ORDER BY u.n), array_agg(DISTINCT n.class_id)
  INTO v_ids, v_new, v_fresh, v_classes FROM unnest(p_drv_paths) WITH ORDINALITY u (path, n) LEFT JOIN new n ON n.drv_path = u.path;
  IF false = ANY (v_fresh) THEN
    SELECT array_agg(j.id ORDER BY u.n) INTO v_ids FROM unnest(p_drv_paths) WITH ORDINALITY u (path, n) JOIN ci.job j ON j.drv_path = u.path;
    -- Was somebody's cached input, must be built now: from here on it is new.
    WITH opened AS (UPDATE ci.job j SET state = 'open', ended_at = NULL, depth = p_depths[u.n], height = greatest(j.height, p_heights[u.n])
                    FROM (SELECT id, n FROM unnest(v_ids, v_fresh) WITH ORDINALITY u (id, fresh, n) WHERE NOT fresh ORDER BY id) u
                    WHERE j.id = u.id AND j.state = 'cached' AND NOT p_cached[u.n] RETURNING j.id)
    SELECT array_agg(id) INTO v_opened FROM opened;
    IF v_opened IS NOT NULL THEN
      SELECT array_agg(u.fresh OR o.id IS NOT NULL ORDER BY u.n) INTO v_fresh
      FROM unnest(v_ids, v_fresh) WITH ORDINALITY u (id, fresh, n) LEFT JOIN unnest(v_opened) o (id) ON o.id = u.id;
      DELETE FROM ci.aterm WHERE job_id = ANY (v_opened);
      DELETE FROM ci.output WHERE job_id = ANY (v_opened);
      DELETE FROM ci.job_input WHERE referrer = ANY (v_opened);
      INSERT INTO ci.unread SELECT unnest(v_opened) ON CONFLICT DO NOTHING;
    END IF;
  END IF;
  v_all := coalesce(v_ids, '{}') || coalesce(p_known, '{}');

  -- What this evaluation did not want before. A new job is nobody else's to want.
  INSERT INTO ci.want (job_id, evaluation_id) SELECT a, p_evaluation FROM unnest(v_new) a ORDER BY 1;
  IF cardinality(v_all) > coalesce(cardinality(v_new), 0) THEN
    WITH wanted AS (INSERT INTO ci.want (job_id, evaluation_id)
                    SELECT DISTINCT a, p_evaluation FROM unnest(v_all) a ORDER BY 1 ON CONFLICT DO NOTHING RETURNING job_id)
    SELECT array_agg(job_id) INTO v_wanted FROM wanted;
  END IF;
  IF v_wanted IS NOT NULL THEN
    v_classes := v_classes || v_known.classes;
    IF false = ANY (v_fresh) THEN      -- some of the chunk were there although they were not said to be known
      SELECT v_known.open || array_agg(j.id) FILTER (WHERE j.state = 'open'), v_known.ended || array_agg(j.id) FILTER (WHERE j.state IN ('cancelled', 'failed')),
             v_classes || array_agg(DISTINCT j.class_id)
      INTO v_known.open, v_known.ended, v_classes FROM unnest(v_ids) a JOIN ci.job j ON j.id = a;
    END IF;
    -- Known jobs gain a lane if this project did not want them yet; mostly its last evaluation did.
    SELECT max(e.id) INTO v_before FROM ci.evaluation e
    WHERE e.project_id = v_evaluation.project_id AND e.tier = v_evaluation.tier AND e.id < p_evaluation AND e.state IN ('evaluating', 'complete');
    INSERT INTO ci.event (kind, subject)
    SELECT 'e', a FROM unnest(v_known.open) a
    WHERE EXISTS (SELECT FROM ci.running r WHERE r.job_id = a AND r.cancelled)
       OR NOT EXISTS (SELECT FROM ci.want w WHERE w.job_id = a AND w.evaluation_id = v_before)
      AND NOT EXISTS (SELECT FROM ci.want w JOIN ci.evaluation e ON e.id = w.evaluation_id
                      WHERE w.job_id = a AND e.project_id = v_evaluation.project_id AND e.tier = v_evaluation.tier
                        AND e.id <> p_evaluation AND e.state IN ('evaluating', 'complete'));   -- event: known_job_gains_lane
    -- What only a cancel or exhausted retries ended opens again, once an evaluation.
    SELECT array_agg(id) INTO v_opened FROM (
      SELECT j.id FROM ci.job j WHERE j.id IN (SELECT unnest(v_known.ended) INTERSECT SELECT unnest(v_wanted)) AND (j.state = 'cancelled'
        OR (j.state = 'failed' AND j.failure IN (SELECT kind FROM ci.failure_kind WHERE NOT sticky AND kind <> 'unsupported')))
      ORDER BY j.id FOR NO KEY UPDATE) x;                                                   -- lock: ingest_reopens
    IF v_opened IS NOT NULL THEN PERFORM ci.reopen(v_opened); END IF;
  END IF;

  INSERT INTO ci.lane (project_id, tier, class_id)
  SELECT DISTINCT v_evaluation.project_id, v_evaluation.tier, c FROM unnest(v_classes) c
  -- Not left to the conflict alone: that would wait for a resolver that has just written the lane and waits at the gate.
  WHERE c IS NOT NULL AND NOT EXISTS (SELECT FROM ci.lane l WHERE l.project_id = v_evaluation.project_id AND l.tier = v_evaluation.tier AND l.class_id = c)
  ORDER BY c ON CONFLICT DO NOTHING;
  -- Every class is matched with every kind of node and ranked with all lanes: nobody may have them grow without end.
  IF (SELECT count(*) FROM ci.lane l WHERE l.project_id = v_evaluation.project_id AND l.tier = v_evaluation.tier) > 1000 THEN
    PERFORM ci.refuse('HC002', 'a project''s derivations ask for at most 1000 kinds of nodes, each one system with some required features');
  END IF;

  INSERT INTO ci.aterm SELECT v_ids[n], a FROM unnest(p_aterms) WITH ORDINALITY u (a, n) WHERE v_fresh[n] AND a IS NOT NULL;
  WITH made AS MATERIALIZED (SELECT v_ids[o] AS job_id, name, path FROM unnest(p_output_of, p_output_names, p_output_paths) u (o, name, path) WHERE v_fresh[o]),
       -- Seen before: in another derivation, in this chunk under another name, or as a canonical path.
       shared AS (SELECT m.job_id FROM made m WHERE EXISTS (SELECT FROM ci.canonical c WHERE c.path = m.path)
                  UNION SELECT x FROM made m JOIN ci.output o ON o.path = m.path CROSS JOIN LATERAL unnest(ARRAY[m.job_id, o.job_id]) x WHERE o.job_id <> m.job_id
                  UNION SELECT unnest(array_agg(m.job_id)) FROM made m WHERE m.path IS NOT NULL GROUP BY m.path HAVING count(*) > 1),
       twins AS (INSERT INTO ci.twin SELECT job_id FROM shared ORDER BY 1 ON CONFLICT DO NOTHING),
       -- One that waits for its inputs may follow the new one instead.
       told AS (INSERT INTO ci.event (kind, subject) SELECT 'e', s.job_id FROM shared s JOIN ci.blocked b USING (job_id))   -- event: twin_is_followed
  INSERT INTO ci.output (job_id, name, path) SELECT job_id, name, path FROM made;
  IF EXISTS (SELECT FROM ci.dying) THEN PERFORM ci.spare(p_output_paths); END IF;           -- fence: ingest_spares
  INSERT INTO ci.job_input (referrer, input)
  SELECT DISTINCT v_ids[o], v_all[i] FROM unnest(p_edge_of, p_edge_to) e (o, i) WHERE v_fresh[o] ORDER BY 1, 2;

  WITH held AS (INSERT INTO ci.blocked (job_id) SELECT v_ids[n] FROM generate_series(1, v_n) n WHERE v_fresh[n] AND NOT p_cached[n] RETURNING job_id)
  INSERT INTO ci.event (kind, subject) SELECT 'e', job_id FROM held;                        -- event: ingested_is_judged
  RETURN coalesce(v_ids, '{}');
END $$;

-- The whole graph is in. p_jobs/p_heights: chains as this evaluation sees them; a job keeps the longest it was ever given.
CREATE FUNCTION ci.complete_evaluation(p_evaluation bigint, p_attrs text[], p_attr_jobs bigint[], p_attr_errors text[],
    p_jobs bigint[], p_heights int[]) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE ci.evaluation SET state = 'complete', ended_at = ci.clock() WHERE id = p_evaluation AND state = 'evaluating';
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC008', format('evaluation %s cannot be completed: it is unknown, complete, aborted or cancelled', p_evaluation));
  END IF;
  INSERT INTO ci.evaluation_attr (evaluation_id, attr, job_id, error)
  SELECT p_evaluation, a, j, e FROM unnest(p_attrs, p_attr_jobs, p_attr_errors) u (a, j, e) ON CONFLICT DO NOTHING;
  WITH raise AS MATERIALIZED (
         SELECT j.id, least(u.h, 1000000) AS h FROM unnest(p_jobs, p_heights) u (id, h) JOIN ci.job j ON j.id = u.id
         -- Not waited for: a builder may keep the row of a job that it ends, and finishes of the others would wait behind us.
         WHERE j.state = 'open' AND j.height < u.h ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED),    -- lock: raise_skips
       raised AS (UPDATE ci.job j SET height = r.h FROM raise r WHERE j.id = r.id RETURNING j.id)
  INSERT INTO ci.event (kind, subject) SELECT 'e', id FROM raised WHERE EXISTS (SELECT FROM ci.ready r WHERE r.job_id = id);   -- event: raised_height_reorders
END $$;

-- Ends an evaluation; what only it wanted is cancelled, step by step. Also for a person's cancel and a newer push.
CREATE FUNCTION ci.end_evaluation(p_evaluation bigint, p_state ci.evaluation_state, p_error text DEFAULT NULL) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_before ci.evaluation_state;
BEGIN
  IF p_state NOT IN ('aborted', 'cancelled') THEN
    PERFORM ci.refuse('HC002', 'an evaluation ends as aborted or cancelled; a complete one is completed');
  END IF;
  UPDATE ci.evaluation e SET state = p_state, error = left(p_error, 16000), ended_at = ci.clock() FROM ci.evaluation b
  WHERE e.id = p_evaluation AND b.id = e.id AND e.state NOT IN ('aborted', 'cancelled') RETURNING b.state INTO v_before;
  IF NOT FOUND THEN RETURN false; END IF;
  -- The resolver looks at all that it wanted, and ingests wait meanwhile: not where all of that has ended, as of most that were
  -- completed long ago. What is opened again at this moment is looked at for that reason. Nothing is known yet of what one that is
  -- still written may want.
  INSERT INTO ci.event (kind, subject) SELECT 'v', p_evaluation
  WHERE v_before <> 'complete' OR EXISTS (
    SELECT FROM (SELECT b.job_id FROM ci.blocked b UNION ALL SELECT r.job_id FROM ci.ready r UNION ALL SELECT r.job_id FROM ci.running r) o
    JOIN ci.want w ON w.job_id = o.job_id WHERE w.evaluation_id = p_evaluation);            -- event: ended_evaluation_cancels
  RETURN true;
END $$;

-- What ran out of memory, alone on its node, goes on where there is more. How much its nodes have, a pool's row says; the
-- class of such a job says how much was too little, so that lanes, claims, demand and `why` know of it as they know of
-- features, and a claim costs what it did.

-- The most memory in which a job has not found enough; 0: none, or nobody knows how much it was.
CREATE FUNCTION ci.outgrown(p_job bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT coalesce(max(p.memory), 0) FROM ci.attempt a JOIN ci.session s ON s.id = a.session_id JOIN ci.profile p ON p.id = s.profile_id
  WHERE a.job_id = p_job AND a.outcome = 'oom'
$$;

-- Is there a pool with more, with or without nodes, in which a project that wants the job may build it?
CREATE FUNCTION ci.has_roomier(p_job bigint, c ci.class, p_memory bigint) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM ci.pool q WHERE q.deleted_at IS NULL AND q.memory > p_memory AND ci.fits(q, c)
    AND ci.may_build_job(q.id, p_job))                                                      -- fence: roomier_may_build
$$;

-- What a failure for want of memory means, behind the builder's own words.
CREATE FUNCTION ci.size_advice(p_job bigint, s ci.session) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN m.memory = 0 THEN ''
    WHEN ci.has_roomier(p_job, c, m.memory) THEN format('; %s of memory are too little, a pool with more comes next', ci.bytes_in_words(m.memory))
    ELSE format('; %s of memory are too little, and no pool that could build it has more', ci.bytes_in_words(m.memory)) END
  FROM ci.job j JOIN ci.class c ON c.id = j.class_id, (SELECT greatest(p.memory, ci.outgrown(p_job)) AS memory FROM ci.profile p WHERE p.id = s.profile_id) m
  WHERE j.id = p_job
$$;

-- Moves ready jobs that ran out of memory, or once did, to the class that fits what they have outgrown: the one they came with, if
-- no pool has more. Under the resolver's lock, before they are offered.
CREATE FUNCTION ci.right_size(p_jobs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE v record; v_class int; v_moved bool := false;
BEGIN
  FOR v IN SELECT j.id, c AS class, ci.outgrown(j.id) AS memory FROM ci.job j JOIN ci.class c ON c.id = j.class_id WHERE j.id = ANY (p_jobs) ORDER BY j.id LOOP
    IF NOT ci.has_roomier(v.id, v.class, v.memory) THEN v.memory := 0; END IF;
    CONTINUE WHEN v.memory = (v.class).memory;
    INSERT INTO ci.class (system, features, memory) VALUES ((v.class).system, (v.class).features, v.memory) ON CONFLICT DO NOTHING;
    SELECT c.id INTO v_class FROM ci.class c WHERE c.system = (v.class).system AND c.features = (v.class).features AND c.memory = v.memory;
    UPDATE ci.job SET class_id = v_class WHERE id = v.id;
    UPDATE ci.ready SET class_id = v_class WHERE job_id = v.id;
    v_moved := true;
  END LOOP;
  IF v_moved THEN PERFORM ci.match_profiles(); END IF;
END $$;

-- The lanes of ready jobs that are in another class than the one they came with: whoever brought them in made those of that one, and
-- whoever wanted them a moment ago may have seen them there. In the order in which an ingest makes its own.
CREATE FUNCTION ci.lay_lanes(p_jobs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM ci.class WHERE memory > 0) THEN RETURN; END IF;    -- a farm in which nothing ever moved pays nothing
  INSERT INTO ci.lane (project_id, tier, class_id)
  SELECT DISTINCT e.project_id, e.tier, j.class_id
  FROM ci.job j JOIN ci.want w ON w.job_id = j.id JOIN ci.evaluation e ON e.id = w.evaluation_id AND e.state IN ('evaluating', 'complete')
  WHERE j.id = ANY (p_jobs) AND EXISTS (SELECT FROM ci.attempt a WHERE a.job_id = j.id AND a.outcome = 'oom')
    AND NOT EXISTS (SELECT FROM ci.lane l WHERE l.project_id = e.project_id AND l.tier = e.tier AND l.class_id = j.class_id)
  ORDER BY j.class_id, e.project_id, e.tier ON CONFLICT DO NOTHING;
END $$;

------------------------------------------------------------------------------------------------ signing everything again

-- One row: who asked for what, and how far it is. Only a signer that has the keys that were asked for does it: while the new
-- ones spread, another still has the old ones.
CREATE TABLE ci.resign (
  id          int PRIMARY KEY CHECK (id = 1),
  keys        text[] CHECK (cardinality(keys) <= 100),      -- public halves, in their order; NULL: nobody asked
  generation  bigint NOT NULL DEFAULT 0,
  holder      text CHECK (octet_length(holder) <= 1024),
  lease_until timestamptz NOT NULL DEFAULT '-infinity',
  after       text COLLATE "C" NOT NULL DEFAULT '',         -- paths up to this one are done
  done        bigint NOT NULL DEFAULT 0,
  asked_at    timestamptz,
  ended_at    timestamptz
);
INSERT INTO ci.resign (id) VALUES (1);

CREATE FUNCTION ci.in_order(p_keys text[]) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$ SELECT array_agg(DISTINCT k ORDER BY k) FROM unnest(p_keys) k $$;

-- Whoever is at it with other keys, or began before, is not heard any more.
CREATE FUNCTION ci.ask_resign(p_keys text[]) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.resign SET keys = ci.in_order(p_keys), generation = generation + 1, holder = NULL, lease_until = '-infinity', after = '', done = 0,
    asked_at = ci.clock(), ended_at = NULL
$$;

CREATE FUNCTION ci.begin_resign(p_holder text, p_keys text[]) RETURNS TABLE (generation bigint, after text)
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.resign r SET generation = r.generation + 1, holder = p_holder, lease_until = ci.clock() + ci.sweep_lease()
  WHERE r.ended_at IS NULL
    AND r.keys = ci.in_order(p_keys)                                                        -- fence: resign_keys
    AND r.lease_until < ci.clock()                                                          -- fence: one_resigns
  RETURNING r.generation, r.after
$$;

CREATE FUNCTION ci.write_resign(p_generation bigint, p_after text, p_count bigint, p_whole bool) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.resign SET after = coalesce(p_after, after), done = done + p_count, ended_at = CASE WHEN p_whole THEN ci.clock() END,
    lease_until = CASE WHEN p_whole THEN '-infinity' ELSE ci.clock() + ci.sweep_lease() END
  WHERE generation = p_generation;                                                          -- fence: resign_generation
  IF NOT FOUND THEN PERFORM ci.refuse('HC005', 'another signs everything again by now'); END IF;
END $$;

CREATE FUNCTION ci.resigned(p_generation bigint, p_after text, p_count bigint) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT ci.write_resign(p_generation, p_after, p_count, false) $$;

CREATE FUNCTION ci.end_resign(p_generation bigint) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT ci.write_resign(p_generation, NULL, 0, true) $$;

CREATE FUNCTION ci.resign_state() RETURNS TABLE (asked_at text, holder text, running bool, done bigint, total bigint, ended_at text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT ci.moment(r.asked_at), r.holder, r.lease_until > ci.clock(), r.done, (SELECT count(*) FROM ci.canonical c WHERE c.file_hash IS NOT NULL), ci.moment(r.ended_at)
  FROM ci.resign r
$$;

GRANT EXECUTE ON FUNCTION ci.ask_resign, ci.begin_resign, ci.resigned, ci.end_resign, ci.resign_state TO harmonia_signer;

------------------------------------------------------------------------------------------------ rollback

-- Programs that know the migrations up to this one, or later ones, still work on the schema: those of the release before. The last
-- migration of every release moves it. A release that was rolled back finds a schema that is newer than itself, and asks here.
CREATE TABLE ci.works_for (
  id    int PRIMARY KEY CHECK (id = 1),
  since bigint NOT NULL
);
INSERT INTO ci.works_for VALUES (1, 19);

-- What forges tell us by webhooks, and what they are told: a status for each commit of an evaluation.

-- How a forge is known: by the address at which people find it. Only projects of a forge have one.
CREATE FUNCTION ci.instance_of(s ci.project_source) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT lower(rtrim(s.instance, '/')) $$;

------------------------------------------------------------------------------------------------ webhooks

-- What was dealt with: the ids of deliveries, and the hashes of their bodies, for only those are signed.
CREATE TABLE ci.delivery (
  forge   text NOT NULL CHECK (octet_length(forge) <= 100),
  key     text NOT NULL CHECK (octet_length(key) <= 200),
  seen_at timestamptz NOT NULL DEFAULT ci.clock(),
  PRIMARY KEY (forge, key)
);
CREATE INDEX delivery_age ON ci.delivery (seen_at);

CREATE FUNCTION ci.keep_delivery(p_forge text, p_keys text[]) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.delivery (forge, key) SELECT p_forge, k FROM unnest(p_keys) k ORDER BY k ON CONFLICT DO NOTHING $$;

-- A month is longer than any forge delivers again.
CREATE FUNCTION ci.prune_deliveries() RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  DELETE FROM ci.delivery WHERE seen_at < ci.clock() - interval '30 days' $$;

-- A branch is gone, or a pull request closed: what it has not finished is cancelled. Answers how many evaluations. p_known: only
-- if that is still its head.
CREATE FUNCTION ci.end_branch(p_project int, p_branch text, p_reason text, p_known text DEFAULT NULL) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.head WHERE project_id = p_project AND branch = p_branch
    AND coalesce(commit_id = p_known, true);                                                -- fence: gone_meanwhile
  IF NOT FOUND AND p_known IS NOT NULL THEN
    RETURN 0;
  END IF;
  RETURN (SELECT count(*) FILTER (WHERE ci.supersede(x.id, x.id, p_reason)) FROM (
    SELECT e.id FROM ci.evaluation e
    WHERE e.project_id = p_project AND e.branch = p_branch AND (e.state IN ('queued', 'evaluating') OR e.state = 'complete'
      AND EXISTS (SELECT FROM ci.want w JOIN ci.job j ON j.id = w.job_id WHERE w.evaluation_id = e.id AND j.state = 'open'))
    ORDER BY e.id) x);
END $$;

------------------------------------------------------------------------------------------------ outside pull requests

-- Pull requests from outside that are open: their head, and the comment that let it be built.
CREATE TABLE ci.pull_request (
  project_id int NOT NULL REFERENCES ci.project,
  number     int NOT NULL,
  commit_id  text NOT NULL CHECK (octet_length(commit_id) <= 200),
  comment_id bigint,                     -- the last that was used; forges count upwards
  allowed_by text CHECK (octet_length(allowed_by) <= 200),
  head_at    timestamptz NOT NULL DEFAULT ci.clock(),   -- when that head was first seen: it was pushed before
  seen_at    timestamptz NOT NULL DEFAULT ci.clock(),   -- when it was last known to be open
  PRIMARY KEY (project_id, number)
);

-- The head of a pull request is this. A new one takes the consent for the old one with it, and cancels its evaluation.
CREATE FUNCTION ci.see_pull_request(p_project int, p_number int, p_branch text, p_commit text) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO ci.pull_request AS r (project_id, number, commit_id) VALUES (p_project, p_number, p_commit)
  ON CONFLICT (project_id, number) DO UPDATE SET commit_id = EXCLUDED.commit_id, allowed_by = NULL, head_at = EXCLUDED.head_at,
    seen_at = EXCLUDED.seen_at
    WHERE r.commit_id <> EXCLUDED.commit_id;
  IF FOUND THEN
    PERFORM ci.end_branch(p_project, p_branch, format('a newer push to pull request %s', p_number));
  END IF;
END $$;

-- A collaborator's comment lets this head be built, and no other. False: it is not the head any more, or an older comment, or a
-- comment that was written before the head was seen here, and so maybe before it was pushed. p_written: when it was, NULL if it names
-- the whole commit.
CREATE FUNCTION ci.allow_pull_request(p_project int, p_number int, p_commit text, p_comment bigint, p_by text, p_written timestamptz)
  RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE ci.pull_request SET allowed_by = left(p_by, 200), comment_id = p_comment
  WHERE project_id = p_project AND number = p_number
    AND commit_id = p_commit                                                                -- fence: allowed_head
    AND coalesce(head_at < p_written, true)                                                 -- fence: comment_after_head
    AND coalesce(comment_id, 0) < p_comment;                                                -- fence: comment_once
  RETURN FOUND;
END $$;

CREATE FUNCTION ci.close_pull_request(p_project int, p_number int, p_branch text) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.pull_request WHERE project_id = p_project AND number = p_number;
  RETURN ci.end_branch(p_project, p_branch, format('pull request %s was closed', p_number));
END $$;

CREATE FUNCTION ci.still_open(p_project int, p_number int) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.pull_request SET seen_at = ci.clock() WHERE project_id = p_project AND number = p_number $$;

------------------------------------------------------------------------------------------------ statuses

-- The outbox: for each commit, the newest evaluation of it speaks. What is wanted follows from that evaluation whenever it
-- is looked at; what the forge was told last is kept here. One frontend at a time has the lease of a row, and a turn with it.
CREATE TABLE ci.report (
  project_id    int NOT NULL REFERENCES ci.project,
  commit_id     text NOT NULL CHECK (octet_length(commit_id) <= 200),
  evaluation_id bigint NOT NULL REFERENCES ci.evaluation ON DELETE CASCADE,
  next_at       timestamptz,             -- when to look; NULL: there is nothing more to tell
  asked         bigint NOT NULL DEFAULT 0,   -- counts reasons to look that came by themselves
  turn          bigint NOT NULL DEFAULT 0,
  lease_until   timestamptz,
  failures      int NOT NULL DEFAULT 0,
  error         text CHECK (octet_length(error) <= 2000),
  told_eval     text CHECK (octet_length(told_eval) <= 2000),
  told_build    text CHECK (octet_length(told_build) <= 2000),
  PRIMARY KEY (project_id, commit_id)
);
CREATE INDEX report_next ON ci.report (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX report_evaluation ON ci.report (evaluation_id);

CREATE FUNCTION ci.want_report() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO ci.report AS r (project_id, commit_id, evaluation_id, next_at)
  SELECT NEW.project_id, NEW.commit_id, NEW.id, ci.clock() FROM ci.project_source s
  WHERE s.project_id = NEW.project_id AND ci.instance_of(s) IS NOT NULL
  ON CONFLICT (project_id, commit_id) DO UPDATE SET evaluation_id = EXCLUDED.evaluation_id, next_at = EXCLUDED.next_at, asked = r.asked + 1
    WHERE coalesce(r.evaluation_id, 0) < EXCLUDED.evaluation_id;                                         -- fence: newest_speaks
  RETURN NULL;
END $$;
-- The source of one that a person asked for may say its commit later. Without a branch it is nobody's but that person's.
CREATE TRIGGER report_new AFTER INSERT ON ci.evaluation FOR EACH ROW
  WHEN (NEW.commit_id IS NOT NULL AND NEW.branch IS NOT NULL) EXECUTE FUNCTION ci.want_report();
CREATE TRIGGER report_known AFTER UPDATE OF commit_id ON ci.evaluation FOR EACH ROW
  WHEN (NEW.commit_id IS DISTINCT FROM OLD.commit_id AND NEW.branch IS NOT NULL) EXECUTE FUNCTION ci.want_report();

-- A forge that asked for patience.
CREATE TABLE ci.forge_pause (
  instance text PRIMARY KEY CHECK (octet_length(instance) <= 2048),
  until    timestamptz NOT NULL
);

CREATE FUNCTION ci.pause_forge(p_instance text, p_for interval) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.forge_pause AS f VALUES (p_instance, ci.clock() + p_for)
  ON CONFLICT (instance) DO UPDATE SET until = greatest(f.until, EXCLUDED.until) $$;

-- Takes what is due, for a minute each. Whoever has not ended it by then is taken for dead.
CREATE FUNCTION ci.due_reports(p_instances text[], p_limit int)
  RETURNS TABLE (project_id int, commit_id text, evaluation_id bigint, turn bigint, asked bigint, failures int, instance text, owner text, repo text,
                 told_eval text, told_build text, project text, shared bool, is_old bool)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE v_now timestamptz := ci.clock();
BEGIN
  RETURN QUERY
  WITH due AS MATERIALIZED (
    SELECT r.project_id, r.commit_id, ci.instance_of(s) AS instance, s.owner, s.repo, p.name,
      EXISTS (SELECT FROM ci.project_source o JOIN ci.project q ON q.id = o.project_id AND q.deleted_at IS NULL WHERE o.project_id <> s.project_id
        AND ci.instance_of(o) = ci.instance_of(s) AND lower(o.owner) = lower(s.owner) AND lower(o.repo) = lower(s.repo)) AS shared
    FROM ci.report r JOIN ci.project_source s ON s.project_id = r.project_id JOIN ci.project p ON p.id = r.project_id
    WHERE r.next_at <= v_now
      AND coalesce(r.lease_until <= v_now, true)                                            -- fence: report_lease
      AND ci.instance_of(s) = ANY (p_instances)
      AND NOT EXISTS (SELECT FROM ci.forge_pause f WHERE f.instance = ci.instance_of(s) AND f.until > v_now)   -- fence: forge_paused
    ORDER BY r.next_at LIMIT p_limit FOR NO KEY UPDATE OF r SKIP LOCKED)                    -- lock: due_reports
  UPDATE ci.report r SET turn = r.turn + 1, lease_until = v_now + interval '60 seconds'
  FROM due d WHERE r.project_id = d.project_id AND r.commit_id = d.commit_id
  RETURNING r.project_id, r.commit_id, r.evaluation_id, r.turn, r.asked, r.failures, d.instance, d.owner, d.repo, r.told_eval, r.told_build, d.name, d.shared,
    coalesce((SELECT e.ended_at < v_now - interval '1 day' FROM ci.evaluation e WHERE e.id = r.evaluation_id), false);
END $$;

-- The forge has been told this. False: the lease was somebody else's meanwhile.
CREATE FUNCTION ci.told(p_project int, p_commit text, p_turn bigint, p_build bool, p_words text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE ci.report SET told_eval = CASE WHEN p_build THEN told_eval ELSE p_words END, told_build = CASE WHEN p_build THEN p_words ELSE told_build END
  WHERE project_id = p_project AND commit_id = p_commit
    AND turn = p_turn;                                                                      -- fence: told_turn
  RETURN FOUND;
END $$;

-- Gives the lease back. p_next: when to look again, NULL for never; at once if there was a reason to look meanwhile.
-- p_error: why the forge was not told.
CREATE FUNCTION ci.end_report(p_project int, p_commit text, p_turn bigint, p_asked bigint, p_next interval, p_error text DEFAULT NULL) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE ci.report SET lease_until = NULL, error = left(p_error, 1000), failures = CASE WHEN p_error IS NULL THEN 0 ELSE failures + 1 END,
    next_at = CASE WHEN p_error IS NULL
      AND asked > p_asked                                                                   -- fence: asked_meanwhile
      THEN ci.clock() ELSE ci.clock() + p_next END
  WHERE project_id = p_project AND commit_id = p_commit
    AND turn = p_turn;                                                                      -- fence: ended_turn
  RETURN FOUND;
END $$;

-- Somebody builds again what had ended.
CREATE FUNCTION ci.look_again(p_evaluations bigint[]) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.report SET next_at = ci.clock(), asked = asked + 1 WHERE evaluation_id = ANY (p_evaluations) $$;

------------------------------------------------------------------------------------------------ missed pushes

-- When the heads of a project's branches are compared next, when they first were, and why they could not be the last time.
CREATE TABLE ci.comparison (
  project_id int PRIMARY KEY REFERENCES ci.project,
  next_at    timestamptz NOT NULL,
  first_at   timestamptz,
  error      text CHECK (octet_length(error) <= 16384)
);

-- Takes a project whose heads are to be compared, until the next time. No row: there is none.
CREATE FUNCTION ci.due_comparison(p_instances text[], p_every interval)
  RETURNS TABLE (project_id int, project text, instance text, owner text, repo text, url text, branch text, attrs text[], first bool)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE v_now timestamptz := ci.clock();
BEGIN
  INSERT INTO ci.comparison (project_id, next_at) SELECT s.project_id, v_now FROM ci.project_source s
  WHERE ci.instance_of(s) = ANY (p_instances) AND NOT EXISTS (SELECT FROM ci.comparison c WHERE c.project_id = s.project_id)
  ORDER BY 1 ON CONFLICT DO NOTHING;
  RETURN QUERY
  WITH due AS MATERIALIZED (
    SELECT c.project_id, p.name, s AS source FROM ci.comparison c JOIN ci.project_source s ON s.project_id = c.project_id JOIN ci.project p ON p.id = c.project_id
    WHERE c.next_at <= v_now AND p.deleted_at IS NULL AND ci.instance_of(s) = ANY (p_instances)
      AND NOT EXISTS (SELECT FROM ci.forge_pause f WHERE f.instance = ci.instance_of(s) AND f.until > v_now)
    ORDER BY c.next_at LIMIT 1 FOR NO KEY UPDATE OF c SKIP LOCKED)                          -- lock: due_comparison
  UPDATE ci.comparison c SET next_at = v_now + p_every FROM due d WHERE c.project_id = d.project_id
  RETURNING c.project_id, d.name, ci.instance_of(d.source), (d.source).owner, (d.source).repo, (d.source).url, (d.source).branch, (d.source).attrs,
    c.first_at IS NULL;
END $$;

-- All heads have been compared.
CREATE FUNCTION ci.compared(p_project int) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.comparison SET first_at = coalesce(first_at, ci.clock()), error = NULL WHERE project_id = p_project AND (first_at IS NULL OR error IS NOT NULL) $$;

CREATE FUNCTION ci.not_compared(p_project int, p_error text) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.comparison SET error = left(p_error, 4000) WHERE project_id = p_project $$;

-- A frontend begins, and pushes may have been missed: whatever was not compared within the last minute is due.
CREATE FUNCTION ci.compare_soon(p_every interval) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.comparison SET next_at = ci.clock() WHERE next_at > ci.clock() AND next_at < ci.clock() + p_every - interval '1 minute' $$;

-- Branches that were there before the project are not built until somebody pushes to them.
CREATE FUNCTION ci.see_heads(p_project int, p_branches text[], p_commits text[]) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.head (project_id, branch, commit_id, seen_at) SELECT p_project, b, c, ci.clock() FROM unnest(p_branches, p_commits) u (b, c)
  ORDER BY b ON CONFLICT DO NOTHING $$;

DO $$
DECLARE v_table text;
BEGIN
  EXECUTE (SELECT string_agg(format('GRANT EXECUTE ON FUNCTION %s TO harmonia_frontend', p.oid::regprocedure), '; ')
           FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname IN
             ('instance_of', 'keep_delivery', 'prune_deliveries', 'end_branch', 'see_pull_request', 'allow_pull_request', 'close_pull_request', 'still_open', 'pause_forge',
              'due_reports', 'told', 'end_report', 'look_again', 'due_comparison', 'compared', 'not_compared', 'compare_soon', 'see_heads'));
  FOREACH v_table IN ARRAY ARRAY['delivery', 'pull_request', 'report', 'forge_pause', 'comparison'] LOOP
    EXECUTE format('GRANT SELECT ON ci.%I TO harmonia_operator, harmonia_frontend', v_table);
  END LOOP;
END $$;

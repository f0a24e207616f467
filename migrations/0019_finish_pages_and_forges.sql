-- Outside pull requests whose forge is told that they wait.

-- A commit that waits for consent is in the outbox without an evaluation: there is none yet.
ALTER TABLE ci.report ALTER evaluation_id DROP NOT NULL;

-- Its forge shall hear that it waits. Not where an evaluation speaks for it already.
CREATE FUNCTION ci.wait_for_consent(p_project int, p_commit text) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.report (project_id, commit_id, next_at)
  SELECT s.project_id, p_commit, ci.clock() FROM ci.project_source s WHERE s.project_id = p_project AND ci.instance_of(s) IS NOT NULL
  ON CONFLICT DO NOTHING $$;

-- The head of a pull request is about to be another, or none: nobody waits for that one any more. Evaluations take theirs with them.
CREATE FUNCTION ci.forget_wait() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.report WHERE project_id = OLD.project_id AND commit_id = OLD.commit_id AND evaluation_id IS NULL;
  RETURN NULL;
END $$;
CREATE TRIGGER forget_wait AFTER UPDATE OF commit_id OR DELETE ON ci.pull_request FOR EACH ROW EXECUTE FUNCTION ci.forget_wait();

REVOKE ALL ON FUNCTION ci.wait_for_consent, ci.forget_wait FROM PUBLIC;
GRANT EXECUTE ON FUNCTION ci.wait_for_consent TO harmonia_frontend;

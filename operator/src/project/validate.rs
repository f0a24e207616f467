use std::time::Duration;

use harmonia_crds::Project;
use harmonia_crds::project::{Source, Trust, pool_name};
use harmonia_queue::branches::{Forge, ProjectSource, PullRequests};
use harmonia_queue::people;
use kube::ResourceExt;

use super::credentials;

/// The project in the queue's words. Pools are those of the same namespace unless another is named.
pub fn wanted<'a>(project: &Project, name: &'a str) -> people::Project<'a> {
    let namespace = project.namespace().unwrap_or_default();
    let pools = |names: &[String]| names.iter().map(|name| pool_name(name, &namespace)).collect();
    let spec = &project.spec;
    people::Project {
        name,
        shares: spec.shares,
        max_concurrent: spec.max_concurrent,
        pools: spec.pools.as_deref().map(pools),
        untrusted_pools: pools(&spec.pull_requests.pools),
        paused: spec.paused,
        retention: Duration::from_secs(u64::from(spec.retention.0) * 86_400),
    }
}

/// Where its code is, in the queue's words. None: nowhere, which the API server does not let through.
pub fn source(project: &Project) -> Option<ProjectSource> {
    let spec = &project.spec;
    let (forge, url) = address(&spec.source)?;
    let git = spec.source.git.as_ref();
    Some(ProjectSource {
        forge,
        branch: git.and_then(|git| git.reference.clone()),
        attrs: spec.attrs.clone(),
        poll_interval: git.map_or(ProjectSource::POLL_INTERVAL, |git| git.poll_interval.0),
        pull_requests: match spec.pull_requests.trust {
            Trust::Collaborators => PullRequests::Collaborators,
            Trust::All => PullRequests::All,
            Trust::None => PullRequests::None,
        },
        credential: credentials::key(project),
        ..ProjectSource::git(url)
    })
}

fn address(source: &Source) -> Option<(Forge, String)> {
    let (github, gitea) = (source.github.clone(), source.gitea.clone());
    let github = github.map(|at| {
        let url = clone_url(&at.instance, &at.owner, &at.repo);
        (Forge::GitHub { instance: at.instance, owner: at.owner, repo: at.repo }, url)
    });
    let gitea = gitea.map(|at| {
        let url = clone_url(&at.instance, &at.owner, &at.repo);
        (Forge::Gitea { instance: at.instance, owner: at.owner, repo: at.repo }, url)
    });
    github.or(gitea).or_else(|| Some((Forge::Git, source.git.clone()?.url)))
}

fn clone_url(instance: &str, owner: &str, repo: &str) -> String {
    format!("{}/{owner}/{repo}.git", instance.trim_end_matches('/'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A Project of the second generation.
    pub fn project(spec: Value) -> Project {
        let mut whole = json!({"source": {"github": {"owner": "acme", "repo": "dotfiles"}}});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        serde_json::from_value(json!({
            "apiVersion": "ci.harmonia.dev/v1alpha1",
            "kind": "Project",
            "metadata": {"name": "dotfiles", "namespace": "ci", "uid": "one", "generation": 2},
            "spec": whole,
        }))
        .unwrap()
    }

    #[test]
    fn pools_are_those_of_the_namespace_unless_another_is_named() {
        let project =
            project(json!({"pools": ["x86", "farm/arm"], "pullRequests": {"pools": ["untrusted"]}}));
        let wanted = wanted(&project, "ci/dotfiles");
        assert_eq!(wanted.pools, Some(vec!["ci/x86".to_owned(), "farm/arm".to_owned()]));
        assert_eq!(wanted.untrusted_pools, ["ci/untrusted"]);
    }

    #[test]
    fn code_is_where_the_forge_has_it() {
        let of = |spec: Value| source(&project(spec)).unwrap();
        assert_eq!(of(json!({})).url, "https://github.com/acme/dotfiles.git");
        let gitea =
            json!({"gitea": {"instance": "https://git.example.org/", "owner": "acme", "repo": "dots"}});
        assert_eq!(of(json!({"source": gitea})).url, "https://git.example.org/acme/dots.git");
        let github =
            json!({"github": {"instance": "https://hub.example.org", "owner": "acme", "repo": "dots"}});
        assert_eq!(of(json!({"source": github})).url, "https://hub.example.org/acme/dots.git");
    }

    #[test]
    fn a_repository_is_followed_as_the_spec_says() {
        let git = json!({"url": "https://git/x", "ref": "next", "pollInterval": "1m"});
        let spec = json!({"source": {"git": git, "secretRef": {"name": "key"}}, "attrs": ["checks"], "pullRequests": {"trust": "None"}});
        let wanted = ProjectSource {
            branch: Some("next".to_owned()),
            attrs: vec!["checks".to_owned()],
            poll_interval: Duration::from_secs(60),
            pull_requests: PullRequests::None,
            credential: Some("ci.key".to_owned()),
            ..ProjectSource::git("https://git/x")
        };
        assert_eq!(source(&project(spec)), Some(wanted));
    }

    #[test]
    fn what_is_not_said_is_the_default() {
        let wanted = wanted(&project(json!({})), "ci/dotfiles");
        assert_eq!(
            (wanted.shares, wanted.max_concurrent, wanted.pools, wanted.paused),
            (100, None, None, false)
        );
        assert_eq!(wanted.retention, Duration::from_secs(90 * 86_400));
    }
}

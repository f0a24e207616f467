use std::time::Duration;

use harmonia_crds::Project;
use harmonia_crds::project::pool_name;
use harmonia_queue::people;
use kube::ResourceExt;

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
    fn what_is_not_said_is_the_default() {
        let wanted = wanted(&project(json!({})), "ci/dotfiles");
        assert_eq!(
            (wanted.shares, wanted.max_concurrent, wanted.pools, wanted.paused),
            (100, None, None, false)
        );
        assert_eq!(wanted.retention, Duration::from_secs(90 * 86_400));
    }
}

use harmonia_tests::kube::{Namespace, Request, eventually, kubectl, requests_of};
use harmonia_tests::operator::SOON;

#[tokio::test]
async fn the_api_answers_and_controllers_make_pods_that_find_no_node() {
    let namespace = Namespace::new("smoke").await;
    assert_eq!(kubectl(&["get", "--raw", "/readyz"]).await, "ok");
    namespace
        .kubectl(&["create", "deployment", "idle", "--image=localhost/busybox:test", "--replicas=2"])
        .await;
    namespace
        .eventually("pods", SOON, |pods| {
            let pods = pods["items"].as_array().unwrap();
            let unschedulable = |pod: &serde_json::Value| {
                let conditions = pod["status"]["conditions"].as_array();
                conditions.is_some_and(|all| all.iter().any(|one| one["reason"] == "Unschedulable"))
            };
            pods.len() == 2 && pods.iter().all(unschedulable)
        })
        .await;
}

#[tokio::test]
async fn the_api_refuses_what_does_not_fit_its_schema() {
    let namespace = Namespace::new("smoke").await;
    let complaint = namespace
        .try_apply("{apiVersion: v1, kind: Pod, metadata: {name: empty}, spec: {containers: []}}")
        .await
        .unwrap_err();
    assert!(complaint.contains("spec.containers: Required value"), "{complaint}");
}

#[tokio::test]
async fn the_audit_log_tells_who_asked_for_what() {
    let namespace = Namespace::new("smoke").await;
    namespace.kubectl(&["create", "serviceaccount", "reader"]).await;
    namespace
        .kubectl(&[
            "create",
            "rolebinding",
            "reader",
            "--clusterrole=view",
            &format!("--serviceaccount={}:reader", namespace.name()),
        ])
        .await;
    let user = format!("system:serviceaccount:{}:reader", namespace.name());
    namespace.kubectl(&["get", "configmap", "kube-root-ca.crt", "--as", &user]).await;
    let _ =
        namespace.try_kubectl(&["delete", "configmap", "kube-root-ca.crt", "--as", &user]).await.unwrap_err();
    let request = |verb: &str, code| Request {
        verb: verb.to_owned(),
        group: String::new(),
        resource: "configmaps".to_owned(),
        subresource: String::new(),
        namespace: namespace.name().to_owned(),
        name: "kube-root-ca.crt".to_owned(),
        code,
    };
    // It is written down after the answer.
    eventually("both requests in the audit log", SOON, async || {
        let asked = requests_of(&user);
        asked.contains(&request("get", 200)) && asked.contains(&request("delete", 403))
    })
    .await;
}

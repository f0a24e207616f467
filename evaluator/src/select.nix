# What nix-eval-jobs is given: what is at one path, its sets marked so that they are entered as far as walk.nix would enter them. What
# nix-eval-jobs has no words for is thrown, as one line of JSON behind the mark.
#
# root: what the source is; settings: see expression.rs.
{ root, settings }:
let
  inherit (builtins)
    all attrNames attrValues elemAt functionArgs genList hasAttr head isAttrs isFunction length mapAttrs tail toJSON typeOf;

  tell = event: throw (settings.mark + toJSON event);

  top = if isFunction root then root { } else root;
  called = value:
    if settings.calls && isFunction value && functionArgs value != { } && all (optional: optional) (attrValues (functionArgs value))
    then value { }
    else value;

  isSet = value: isAttrs value && value.type or null != "derivation";
  entered = depth: value:
    if isSet value && depth < settings.levels
    then mapAttrs (_: inner: entered (depth + 1) (called inner)) value // { recurseForDerivations = true; }
    else value;

  reach = done: todo: value:
    if todo == [ ] then called value
    else
      let set = called value;
      in
      if isAttrs set && hasAttr (head todo) set then reach (done ++ [ (head todo) ]) (tail todo) set.${head todo}
      else tell { missing = { inherit (settings) path; within = done; names = some (if isAttrs set then attrNames set else [ ]); }; };
  some = names: genList (elemAt names) (if length names < 1000 then length names else 1000);

  found = reach [ ] settings.path top;
  count = length (attrNames found);
in
if !isAttrs found then tell { other = { inherit (settings) path; type = typeOf found; }; }
else if !isSet found then found
else if count > settings.most then tell { within = { inherit (settings) path; inherit count; }; }
# What was asked for is entered whatever it says.
else mapAttrs (_: inner: entered (length settings.path + 1) (called inner)) found // { recurseForDerivations = true; }

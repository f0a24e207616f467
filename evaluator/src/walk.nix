# Walks a set of attributes and tells what it finds by traces, one line of JSON each, while it finds it: a line `at` before
# anything of an attribute is looked at, so that whoever listens knows which one it was that could not be evaluated.
#
# root: what the source is; settings: see expression.rs.
{ root, settings }:
let
  inherit (builtins)
    all attrNames attrValues elemAt filter foldl' functionArgs genList hasAttr head isAttrs isFunction length seq tail trace
    tryEval typeOf;

  say = event: trace (settings.mark + builtins.toJSON event) null;

  # A file that is a function is called without arguments, an attribute only if it names arguments and needs none.
  top = if isFunction root then root { } else root;
  called = value:
    if settings.calls && isFunction value && functionArgs value != { } && all (optional: optional) (attrValues (functionArgs value))
    then value { }
    else value;

  look = named: path: uncalled:
    let value = called uncalled;
    in
    if !isAttrs value then { type = typeOf value; }
    else if value.type or null == "derivation" then { drv = value.drvPath; }
    else if named || length path < settings.levels || value.recurseForDerivations or false == true
    then { names = attrNames value; set = value; }
    else { type = "set"; };

  # What `throw` and `assert` say is lost here: who wants to hear it asks again, without catching.
  tried = value: if settings.catch then tryEval value else { success = true; inherit value; };
  looked = found: seq (found.drv or null) (seq (found.names or null) found);

  visit = named: after: path: value:
    seq (say { at = path; }) (
      let
        seen = tried (looked (look named path value));
        found = seen.value;
      in
      if !seen.success then say { threw = path; }
      else if found ? drv then say { found = { inherit path; drv = found.drv; }; }
      else if found ? names then
        seq (say { within = { inherit path; count = length found.names; }; }) (walk after path found.set (part named path found.names))
      else if named then say { other = { inherit path; inherit (found) type; }; }
      else null
    );

  # Of several processes each takes every so many-th name of a set, at the level where derivations are: in a flake, below the systems.
  part = named: path: names:
    if settings.parts == 1 || length path + 1 < settings.levels || length path + 1 > settings.levels && !named then names
    else map (n: elemAt names (settings.part + n * settings.parts)) (genList (n: n) (share (length names)));
  share = count: if settings.part < count then (count - 1 - settings.part) / settings.parts + 1 else 0;

  # `after`: how far an earlier pass came. Names are in their order.
  walk = after: path: set: names:
    foldl'
      (_: name: visit false (if after != [ ] && name == head after then tail after else [ ]) (path ++ [ name ]) set.${name})
      null
      (if after == [ ] then names
      else filter (name: if tail after == [ ] then head after < name else !(name < head after)) names);

  # To an attribute that somebody named.
  reach = after: path: done: todo: value:
    if todo == [ ] then visit true after path value
    else
      let seen = tried (let set = called value; in seq (isAttrs set && hasAttr (head todo) set) set);
      in
      if !seen.success then say { threw = path; }
      else if isAttrs seen.value && hasAttr (head todo) seen.value
      then reach after path (done ++ [ (head todo) ]) (tail todo) seen.value.${head todo}
      else say { missing = { inherit path; within = done; names = some (if isAttrs seen.value then attrNames seen.value else [ ]); }; };

  some = names: genList (elemAt names) (if length names < 1000 then length names else 1000);
in
foldl' (_: root: seq (say { at = root.path; }) (reach root.after root.path [ ] root.path top)) null settings.roots

// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {CfaToken} from "./CfaToken.sol";
import {MOVE, Roles} from "./Roles.sol";

/// Moves all holders of a token to the token that replaces it, with their freezes.
///
/// Both tokens are paused until the last part. A part burns the units of its holders in the old
/// token and gives the same units in the new one. Parts are accepted in order and once, and each is
/// atomic. All holders are moved when the old token's supply is 0: nothing is read from outside but
/// the list of addresses, and a wrong list moves nothing wrong.
///
/// Needs the role REDEEM of the old token (of version 1: its agent) and MOVE of the new one.
contract Migration is Roles {
    uint256 public constant HOLDERS_MAX = 256;

    mapping(CfaToken from => mapping(CfaToken to => uint256)) public partsDone;

    event HolderMoved(
        address indexed from,
        address indexed to,
        address indexed holder,
        uint256 units,
        uint256 frozenUnits,
        bool frozen
    );
    event PartMoved(address indexed from, address indexed to, uint256 part, uint256 units, uint256 left);

    error WrongPart(uint256 expected, uint256 given);
    error MalformedPart();
    error NotPaused(address token);
    error OtherDecimals();

    constructor(address owner_, address[] memory accounts, uint256[] memory roles)
        Roles(owner_, accounts, roles)
    {}

    /// A holder without units is passed over, unless it is frozen.
    function moveHolders(uint256 part, CfaToken from, CfaToken to, address[] calldata holders)
        external
        onlyRole(MOVE)
    {
        if (part != partsDone[from][to]) revert WrongPart(partsDone[from][to], part);
        if (holders.length == 0 || holders.length > HOLDERS_MAX || address(from) == address(to)) {
            revert MalformedPart();
        }
        if (!from.paused()) revert NotPaused(address(from));
        if (!to.paused()) revert NotPaused(address(to));
        if (from.decimals() != to.decimals()) revert OtherDecimals();
        partsDone[from][to] = part + 1;
        uint256 moved = 0;
        for (uint256 i = 0; i < holders.length; ++i) moved += _move(from, to, holders[i]);
        emit PartMoved(address(from), address(to), part, moved, from.totalSupply());
    }

    function _move(CfaToken from, CfaToken to, address holder) private returns (uint256 units) {
        units = from.balanceOf(holder);
        bool frozen = from.isFrozen(holder);
        if (units == 0 && !frozen) return 0;
        uint256 frozenUnits = from.getFrozenTokens(holder);
        if (units != 0) from.burn(holder, units);
        to.takeOver(holder, units, frozenUnits, frozen);
        emit HolderMoved(address(from), address(to), holder, units, frozenUnits, frozen);
    }
}
